// Rows of a table, times a number, each with a row of another matrix added where there is one.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"
#include "cpu/linear/columns.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core

// y = term(row), plus `added` where there is one.
template <class T, class Term>
void sum_row(const T* row, const T* added, int64_t channels, T* y, const Term& term) {
  for (int64_t c = 0; c < channels; c += kLanes) {
    const int n = static_cast<int>(channels - c < kLanes ? channels - c : kLanes);
    const Vec v = term(load_first(row + c, n));
    store_first(y + c, added ? add(v, load_first(added + c, n)) : v, n);
  }
}

template <class T>
struct PlainTable {
  const EmbeddingArgs& args;
  const T* operator()(int64_t id) const { return static_cast<const T*>(args.table) + id * args.channels; }
};

#if defined(__AVX512BF16__)  // see packs_rows
template <class T>
struct PackedTable {
  const EmbeddingArgs& args;
  T* row = scratch<T, PackedTable>(args.channels);
  const T* operator()(int64_t id) const {
    Columns<T>::turn_back(static_cast<const T*>(args.table), id, args.channels, row);
    return row;
  }
};
#endif

template <class T, template <class> class Table>
void embedding_of(const EmbeddingArgs& args, int64_t effort) {
  parallel_for(args.tokens, kGrainElements / (args.channels * effort + 1), [&](int64_t begin, int64_t end) {
    const Table<T> row_of{args};
    for (int64_t t = begin; t < end; ++t) {
      const T* row = row_of(args.ids[t]);
      T* y = static_cast<T*>(args.y) + t * args.channels;
      if (!args.added && args.scale == 1.0f) {
        __builtin_memcpy(y, row, args.channels * sizeof(T));
        continue;
      }
      const T* added = args.added ? static_cast<const T*>(args.added) + t * args.channels : nullptr;
      if (args.scale == 1.0f)
        sum_row(row, added, args.channels, y, [](Vec v) { return v; });
      else
        sum_row(row, added, args.channels, y, [&](Vec v) { return mul(v, set1(args.scale)); });
    }
  });
}

}  // namespace

void embedding(const EmbeddingArgs& args) {
#if defined(__AVX512BF16__)
  if (args.packed) return embedding_of<bf16, PackedTable>(args, kPackedLookUp);
#endif
  switch (args.dtype) {
    case DType::float32: return embedding_of<float, PlainTable>(args, 1);
    case DType::bfloat16: return embedding_of<bf16, PlainTable>(args, 1);
    case DType::float16: return embedding_of<fp16, PlainTable>(args, 1);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

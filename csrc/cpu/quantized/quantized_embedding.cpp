// Rows of a table of quantized rows: unpacked in float, times a number, with a row of another matrix added where there is
// one, and rounded once.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/quantized/unpack.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 4096;  // about 5 microseconds on one core

template <class T>
void embedding_as(const EmbeddingArgs& args) {
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    float* row = scratch<float, T>(args.channels);
    for (int64_t t = begin; t < end; ++t) {
      const uint8_t* bytes = static_cast<const uint8_t*>(args.table) + args.ids[t] * args.format->row_bytes;
      unpack_rows(*args.format, bytes, 1, args.channels, row);
      T* y = static_cast<T*>(args.y) + t * args.channels;
      for (int64_t c = 0; c < args.channels; c += kLanes) {
        const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
        Vec value = load_first(row + c, n);
        if (args.scale != 1.0f) value = mul(value, set1(args.scale));
        if (args.added) value = add(value, load_first(static_cast<const T*>(args.added) + t * args.channels + c, n));
        store_first(y + c, value, n);
      }
    }
  });
}

}  // namespace

void quantized_embedding(const EmbeddingArgs& args) {
  switch (args.dtype) {
    case DType::float32: return embedding_as<float>(args);
    case DType::bfloat16: return embedding_as<bf16>(args);
    case DType::float16: return embedding_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

// New keys and values into their cache slots: as they are, or as int8 with a scale of each row.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core
constexpr float kGreatest = 127;           // so that -x is as exact as x

// A row as whole numbers up to kGreatest times a scale; a row with a number that is not finite as NaN, all of it.
template <class T>
void quantize(const T* row, int64_t dim, int8_t* to, int64_t scale_at) {
  Vec greatest = zero(), nothing = zero();
  for (int64_t d = 0; d < dim; d += kLanes) {
    const Vec x = dim - d < kLanes ? load_first(row + d, static_cast<int>(dim - d)) : load(row + d);
    greatest = max(abs(x), greatest);
    nothing = add(nothing, sub(x, x));  // of infinity and NaN: NaN
  }
  const bool finite = reduce_add(nothing) == 0;
  const float scale = finite ? reduce_max(greatest) / kGreatest : __builtin_nanf("");
  __builtin_memcpy(to + scale_at, &scale, sizeof scale);
  if (!(scale > 0)) {
    __builtin_memset(to, 0, dim);
    return;
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int left = static_cast<int>(dim - d < kLanes ? dim - d : kLanes);
    const Vec whole = round(div(load_first(row + d, left), set1(scale)));
    store_first(to + d, max(set1(-kGreatest), min(set1(kGreatest), whole)), left);
  }
}

// Puts token t's rows [G, dim], of `rows` in which tokens lie `stride` elements apart, into its slot of a cache whose
// rows lie row_bytes apart: copy(from, to) puts one.
template <class Copy>
void put(const WriteKvArgs& args, const void* rows, int64_t stride, int64_t dim, void* cache, int64_t row_bytes,
         int64_t t, const Copy& copy) {
  const int64_t block = args.slots[t] / args.block_size, offset = args.slots[t] % args.block_size;
  const char* from = static_cast<const char*>(rows) + t * stride * args.element_bytes;
  char* to = static_cast<char*>(cache) + (block * args.kv_heads * args.block_size + offset) * row_bytes;
  for (int64_t g = 0; g < args.kv_heads; ++g)
    copy(from + g * dim * args.element_bytes, to + g * args.block_size * row_bytes);
}

template <class Token>
void for_tokens(const WriteKvArgs& args, const Token& token) {
  const int64_t grain = 8 * kGrainElements / (args.kv_heads * (args.head_dim + args.value_dim) + 1);
  parallel_for(args.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) token(t);
  });
}

void copy_rows(const WriteKvArgs& args) {
  const auto copy = [&](const void* rows, int64_t stride, int64_t dim, void* cache, int64_t t) {
    const int64_t bytes = dim * args.element_bytes;
    put(args, rows, stride, dim, cache, bytes, t,
        [&](const char* from, char* to) { __builtin_memcpy(to, from, bytes); });
  };
  for_tokens(args, [&](int64_t t) {
    copy(args.key, args.key_stride, args.head_dim, args.keys, t);
    if (args.value) copy(args.value, args.value_stride, args.value_dim, args.values, t);
  });
}

template <class T>
void quantize_rows(const WriteKvArgs& args) {
  const auto write = [&](const void* rows, int64_t stride, int64_t dim, void* cache, int64_t row_bytes,
                         int64_t scale_at, int64_t t) {
    put(args, rows, stride, dim, cache, row_bytes, t, [&](const char* from, char* to) {
      quantize(reinterpret_cast<const T*>(from), dim, reinterpret_cast<int8_t*>(to), scale_at);
    });
  };
  for_tokens(args, [&](int64_t t) {
    write(args.key, args.key_stride, args.head_dim, args.keys, args.key_bytes, args.key_scale_at, t);
    if (args.value)
      write(args.value, args.value_stride, args.value_dim, args.values, args.value_bytes, args.value_scale_at, t);
  });
}

}  // namespace

void write_kv(const WriteKvArgs& args) {
  if (args.key_scale_at == 0) return copy_rows(args);
  switch (args.dtype) {
    case DType::float32: return quantize_rows<float>(args);
    case DType::bfloat16: return quantize_rows<bf16>(args);
    case DType::float16: return quantize_rows<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

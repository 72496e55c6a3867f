// Rotary position embedding, in place.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core

// One token's heads: (a, b) becomes (a cos - b sin, b cos + a sin) for a and b half a rotary width apart.
template <class T>
void rotate(T* heads, int64_t count, int64_t head_dim, const float* cos, int64_t half) {
  const float* sin = cos + half;
  for (int64_t c = 0; c < half; c += kLanes) {
    const int n = static_cast<int>(half - c < kLanes ? half - c : kLanes);
    const Vec vcos = load_first(cos + c, n), vsin = load_first(sin + c, n);
    for (int64_t h = 0; h < count; ++h) {
      T* first = heads + h * head_dim + c;
      T* second = first + half;
      if (n == kLanes) {
        const Vec a = load(first), b = load(second);
        store(first, sub(mul(a, vcos), mul(b, vsin)));
        store(second, add(mul(b, vcos), mul(a, vsin)));
      } else {
        const Vec a = load_first(first, n), b = load_first(second, n);
        store_first(first, sub(mul(a, vcos), mul(b, vsin)), n);
        store_first(second, add(mul(b, vcos), mul(a, vsin)), n);
      }
    }
  }
}

template <class T>
void rotary_as(const RotaryArgs& args) {
  const int64_t half = args.rotary_dim / 2;
  const int64_t elements = (args.heads + args.kv_heads) * args.head_dim;
  parallel_for(args.tokens, kGrainElements / (elements + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cos = args.cos_sin + args.positions[t] * args.rotary_dim;
      rotate(static_cast<T*>(args.query) + t * args.query_stride, args.heads, args.head_dim, cos, half);
      rotate(static_cast<T*>(args.key) + t * args.key_stride, args.kv_heads, args.head_dim, cos, half);
    }
  });
}

}  // namespace

void rotary(const RotaryArgs& args) {
  switch (args.dtype) {
    case DType::float32: return rotary_as<float>(args);
    case DType::bfloat16: return rotary_as<bf16>(args);
    case DType::float16: return rotary_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

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

// The same for a and b side by side. Cosines and sines are loaded once for all heads.
template <class T>
void rotate_pairs(T* heads, int64_t count, int64_t head_dim, const float* cos, int64_t half) {
  const float* sin = cos + half;
  for (int64_t c = 0; c < half; c += kLanes) {
    const int n = static_cast<int>(half - c < kLanes ? half - c : kLanes);
    const Vec vcos = load_first(cos + c, n), vsin = load_first(sin + c, n);
    // Of the 2 n elements, those of the first register and of the second.
    const int n0 = 2 * n < kLanes ? 2 * n : kLanes, n1 = 2 * n - n0;
    for (int64_t h = 0; h < count; ++h) {
      T* low = heads + h * head_dim + 2 * c;
      T* high = low + n0;
      const bool whole = n == kLanes;
      const Vec x0 = whole ? load(low) : load_first(low, n0), x1 = whole ? load(high) : load_first(high, n1);
      const Vec a = evens(x0, x1), b = odds(x0, x1);
      Vec turned[2];
      zip(sub(mul(a, vcos), mul(b, vsin)), add(mul(b, vcos), mul(a, vsin)), turned);
      if (whole) {
        store(low, turned[0]);
        store(high, turned[1]);
      } else {
        store_first(low, turned[0], n0);
        store_first(high, turned[1], n1);
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
      const auto turn = args.interleaved ? rotate_pairs<T> : rotate<T>;
      turn(static_cast<T*>(args.query) + t * args.query_stride + args.first, args.heads, args.head_dim, cos, half);
      if (args.key)
        turn(static_cast<T*>(args.key) + t * args.key_stride + args.first, args.kv_heads, args.head_dim, cos, half);
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

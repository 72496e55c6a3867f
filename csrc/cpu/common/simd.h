// Sixteen floats as one value: `Vec`. Kernels are written once on it, as templates over the element type, and
// compiled once for each instruction set (QUIRE_ISA names the namespace; see CMakeLists.txt).
//
// Element types: float, bf16, fp16; int8_t, for numbers from -128 to 127. Arithmetic is in float whatever the
// element type.
//   load(p) / store(p, v)                     16 elements at any address, converted (round to nearest even)
//   load_first(p, n) / store_first(p, v, n)   only the first n, 0 <= n <= 16; lanes past n load as zero
//   zero set1 add sub mul div min max abs round exp expm1 sigmoid tanh
//   fma(a, b, c)              a * b + c, with one rounding except in the portable build
//   keep_first(a, n, rest)    the first n lanes of a, the others of rest
//   select_negative(s, a, b)  a where s < 0, else b
//   evens(a, b), odds(a, b)   every other lane of a, then of b: the first, third ..; the second, fourth ..
//   zip(a, b, ab)             the reverse: ab[0] and ab[1] become a0 b0 a1 b1 ..
//   reduce_add, reduce_max    in one fixed order: lanes i and i + 8 first, then i + 4, i + 2, i + 1
// max(a, b) and min(a, b) give b where either is NaN (reduce_max says nothing of NaN).
//
// No header of the standard library with functions in it may be included here: a copy compiled with AVX-512 could be
// the one that the linker keeps for everybody.
#pragma once

#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quire {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

namespace QUIRE_ISA {

constexpr int kLanes = 16;

#if defined(__AVX512F__)
#include "cpu/common/simd_avx512.h"
#elif defined(__AVX2__)
#include "cpu/common/simd_avx2.h"
#else
#include "cpu/common/simd_portable.h"
#endif

#if !defined(__AVX512F__)
// Without masked memory operations, a tail goes through a full-width buffer.
template <class T>
inline Vec load_first(const T* p, int n) {
  T buffer[kLanes] = {};
  __builtin_memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}
template <class T>
inline void store_first(T* p, Vec a, int n) {
  T buffer[kLanes];
  store(buffer, a);
  __builtin_memcpy(p, buffer, n * sizeof(T));
}
#endif

// e to the a, within 1 ulp with fma and 2 without; infinite above 88.73, zero below -103.98, NaN for NaN.
inline Vec exp(Vec a) {
  const Vec x = max(set1(-104.0f), min(set1(89.0f), a));
  const Vec n = round(mul(x, set1(1.44269504f)));
  // x - n ln 2, with ln 2 in two parts: the first has few enough bits for an exact product.
  Vec r = sub(x, mul(n, set1(0.693359375f)));
  r = fma(n, set1(2.12194440e-4f), r);
  // e^r = 1 + r + r^2 q(r) on |r| <= ln(2) / 2; q fitted at Chebyshev nodes, relative error 5e-9.
  Vec q = set1(0.00139461947f);
  q = fma(q, r, set1(0.00836914405f));
  q = fma(q, r, set1(0.0416662693f));
  q = fma(q, r, set1(0.166665167f));
  q = fma(q, r, set1(0.5f));
  const Vec p = add(set1(1.0f), fma(mul(r, r), q, r));
  return scale_by_power(p, n);
}

// e to the a, less 1, for a below 87; relative error as of exp.
inline Vec expm1(Vec a) {
  const Vec x = max(set1(-104.0f), min(set1(87.0f), a));
  const Vec n = round(mul(x, set1(1.44269504f)));
  Vec r = sub(x, mul(n, set1(0.693359375f)));
  r = fma(n, set1(2.12194440e-4f), r);
  // e^r - 1 = r + r^2 q(r), as in exp, with two more terms: where n is 0, nothing hides what q leaves out.
  Vec q = set1(1.98412698e-4f);
  q = fma(q, r, set1(0.00138888889f));
  q = fma(q, r, set1(0.00833333333f));
  q = fma(q, r, set1(0.0416666667f));
  q = fma(q, r, set1(0.166666667f));
  q = fma(q, r, set1(0.5f));
  const Vec p = fma(mul(r, r), q, r);
  return add(scale_by_power(p, n), sub(scale_by_power(set1(1.0f), n), set1(1.0f)));
}

inline Vec sigmoid(Vec a) { return div(set1(1.0f), add(set1(1.0f), exp(sub(zero(), a)))); }

// (e^2|a| - 1) / (e^2|a| + 1), with a's sign: no difference of numbers that are nearly the same.
inline Vec tanh(Vec a) {
  const Vec e = expm1(mul(min(set1(10.0f), abs(a)), set1(2.0f)));
  const Vec t = div(e, add(e, set1(2.0f)));
  return select_negative(a, sub(zero(), t), t);
}

}  // namespace QUIRE_ISA
}  // namespace quire

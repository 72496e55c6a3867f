// The registers of a dot product, for each instruction set and element type:
//   Dot<T>::Sum       the partial sums of one dot product, one in each lane
//   Dot<T>::Operand   kStep elements of either factor; load_first pads with zeros past n
//   multiply_add      sum += x * w, lane by lane
//   reduce4           the totals of four Sums, each by the same tree of additions, in a Vec's first four lanes
// kTileTokens x kTileRows dot products are kept in registers at once.
#pragma once

#include "simd.h"

namespace quire {
namespace QUIRE_ISA {

#if defined(__AVX512F__)

constexpr int kTileTokens = 6, kTileRows = 4;

struct Dot512 {
  using Sum = __m512;

  static Sum zero() { return _mm512_setzero_ps(); }

  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
    const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)),
                                      _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return {_mm512_castps128_ps512(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)))};
  }
};

template <class T>
struct Dot : Dot512 {
  using Operand = __m512;
  static constexpr int kStep = 16;
  static Operand load(const T* p) { return QUIRE_ISA::load(p).v; }
  static Operand load_first(const T* p, int n) { return QUIRE_ISA::load_first(p, n).v; }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return _mm512_fmadd_ps(x, w, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Dot<bf16> : Dot512 {
  using Operand = __m512i;
  static constexpr int kStep = 32;
  static Operand load(const bf16* p) { return _mm512_loadu_si512(p); }
  static Operand load_first(const bf16* p, int n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << n) - 1), p);
  }
  static Sum multiply_add(Sum sum, Operand x, Operand w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
  }
};
#endif

#elif defined(__AVX2__)

constexpr int kTileTokens = 3, kTileRows = 4;

template <class T>
struct Dot {
  using Sum = __m256;
  using Operand = __m256;
  static constexpr int kStep = 8;

  static Sum zero() { return _mm256_setzero_ps(); }
  static Operand load(const float* p) { return _mm256_loadu_ps(p); }
  template <class Half>
  static Operand load(const Half* p) {
    return widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), Half{});
  }
  static Operand load_first(const T* p, int n) {
    T buffer[kStep] = {};
    __builtin_memcpy(buffer, p, n * sizeof(T));
    return load(buffer);
  }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return _mm256_fmadd_ps(x, w, sum); }

  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const __m256d ab2 = _mm256_castps_pd(ab), cd2 = _mm256_castps_pd(cd);
    const __m256 abcd = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)),
                                      _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2)));
    const __m128 totals = _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1));
    return {_mm256_castps128_ps256(totals), _mm256_setzero_ps()};
  }
};

#else

constexpr int kTileTokens = 2, kTileRows = 4;

template <class T>
struct Dot {
  using Sum = Vec;
  using Operand = Vec;
  static constexpr int kStep = kLanes;

  static Sum zero() { return QUIRE_ISA::zero(); }
  static Operand load(const T* p) { return QUIRE_ISA::load(p); }
  static Operand load_first(const T* p, int n) { return QUIRE_ISA::load_first(p, n); }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return fma(x, w, sum); }
  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    return {Floats{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)}};
  }
};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire

// How rows of T become floats, sixteen units of 32 bits at a time.
//
// A unit of a float or an fp16 is one element, as a float. A unit of bf16 is two elements: each becomes a float by a
// shift or a mask, which is half of what it costs to spread sixteen of them over a register. So bf16 comes in steps of
// 32, even elements first, then odd ones; what is computed from them lane by lane is put in order at the end.
//
//   Units<T>::kStep, kParts   elements of a step, and floats of a unit
//   load(p), load(p, n)       a step's units, or of its first n elements, the others zero
//   part<k>(units)            float k of each unit
//   in_order(parts)           kParts Vecs of parts become the elements in their order
//
// Rows of int8_t are loaded as units of T, too: what they become is exact in each T.
//
// A register has four quads of units:
//   turn_quads(rows)          the quads of four Vecs, transposed in place
//   load_quad(p)              four floats, in every quad
//   finish_quads(a, b, c, d)  of Vecs whose quads have each four partial sums of a number: the four totals of a, then
//                             those of b, c and d; partial sums 0 + 2 and 1 + 3, then these two
#pragma once

#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {

template <class T>
struct Units {
  static constexpr int kStep = kLanes, kParts = 1;
  template <class S>
  static Vec load(const S* p) {
    return QUIRE_ISA::load(p);
  }
  template <class S>
  static Vec load(const S* p, int n) {
    return load_first(p, n);
  }
  template <int>
  static Vec part(Vec units) {
    return units;
  }
  static void in_order(Vec*) {}
};

struct UnitsOfPairs {
  static constexpr int kStep = 2 * kLanes, kParts = 2;
#if defined(__AVX512F__)
  static Vec load(const bf16* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p, int n) {
    const __mmask32 mask = n < 32 ? static_cast<__mmask32>((1u << n) - 1) : ~__mmask32{0};
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, p))};
  }
  static Vec load(const int8_t* p) { return of_bytes(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  static Vec load(const int8_t* p, int n) {
    const __mmask32 mask = n < 32 ? static_cast<__mmask32>((1u << n) - 1) : ~__mmask32{0};
    return of_bytes(_mm256_maskz_loadu_epi8(mask, p));
  }
  static Vec of_bytes(__m256i bytes) {
#if defined(__AVX512BF16__)
    const Vec first = widen(_mm256_castsi256_si128(bytes)), second = widen(_mm256_extracti128_si256(bytes, 1));
    return {_mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(second.v, first.v))};
#else
    const __m512i pairs = _mm512_cvtepu16_epi32(bytes);
    const __m512 even = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 24), 24));
    const __m512 odd = _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 24));
    return {_mm512_or_ps(_mm512_castsi512_ps(_mm512_srli_epi32(_mm512_castps_si512(even), 16)), odd)};
#endif
  }
  template <int kPart>
  static Vec part(Vec units) {
    const __m512i pairs = _mm512_castps_si512(units.v);
    return {_mm512_castsi512_ps(kPart == 0 ? _mm512_slli_epi32(pairs, 16)
                                           : _mm512_and_si512(pairs, _mm512_set1_epi32(~0xffff)))};
  }
#elif defined(__AVX2__)
  static Vec load(const bf16* p) { return QUIRE_ISA::load(reinterpret_cast<const float*>(p)); }
  static Vec load(const int8_t* p) {
    const __m128i* bytes = reinterpret_cast<const __m128i*>(p);
    return {of_bytes(_mm_loadu_si128(bytes)), of_bytes(_mm_loadu_si128(bytes + 1))};
  }
  static __m256 of_bytes(__m128i bytes) {
    const __m256i pairs = _mm256_cvtepu16_epi32(bytes);
    const __m256 even = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 24), 24));
    const __m256 odd = _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 24));
    return _mm256_or_ps(_mm256_castsi256_ps(_mm256_srli_epi32(_mm256_castps_si256(even), 16)), odd);
  }
  template <int kPart>
  static __m256 part8(__m256 units) {
    const __m256i pairs = _mm256_castps_si256(units);
    return _mm256_castsi256_ps(kPart == 0 ? _mm256_slli_epi32(pairs, 16)
                                          : _mm256_and_si256(pairs, _mm256_set1_epi32(~0xffff)));
  }
  template <int kPart>
  static Vec part(Vec units) {
    return {part8<kPart>(units.lo), part8<kPart>(units.hi)};
  }
#else
  static Vec load(const bf16* p) { return QUIRE_ISA::load(reinterpret_cast<const float*>(p)); }
  static Vec load(const int8_t* p) {
    Halves halves;
    __builtin_memcpy(&halves, p, sizeof halves);
    const Bits pairs = __builtin_convertvector(halves, Bits);
    const Floats even = __builtin_convertvector((Ints)(pairs << 24) >> 24, Floats);
    const Floats odd = __builtin_convertvector((Ints)(pairs << 16) >> 24, Floats);
    return {(Floats)((Bits)even >> 16 | (Bits)odd)};
  }
  template <int kPart>
  static Vec part(Vec units) {
    return {(Floats)(kPart == 0 ? (Bits)units.v << 16 : (Bits)units.v & 0xffff0000)};
  }
#endif
  static void in_order(Vec* parts) { zip(parts[0], parts[1], parts); }
#if !defined(__AVX512F__)
  template <class S>
  static Vec load(const S* p, int n) {
    S buffer[kStep] = {};
    __builtin_memcpy(buffer, p, n * sizeof(S));
    return load(buffer);
  }
#endif
};
template <>
struct Units<bf16> : UnitsOfPairs {};

#if defined(__AVX512F__)

inline void turn_quads(Vec* rows) {
  const __m512 a = rows[0].v, b = rows[1].v, c = rows[2].v, d = rows[3].v;
  const __m512 ab = _mm512_shuffle_f32x4(a, b, 0x44), ab2 = _mm512_shuffle_f32x4(a, b, 0xee);
  const __m512 cd = _mm512_shuffle_f32x4(c, d, 0x44), cd2 = _mm512_shuffle_f32x4(c, d, 0xee);
  rows[0].v = _mm512_shuffle_f32x4(ab, cd, 0x88);
  rows[1].v = _mm512_shuffle_f32x4(ab, cd, 0xdd);
  rows[2].v = _mm512_shuffle_f32x4(ab2, cd2, 0x88);
  rows[3].v = _mm512_shuffle_f32x4(ab2, cd2, 0xdd);
}
inline Vec load_quad(const float* p) { return {_mm512_broadcast_f32x4(_mm_loadu_ps(p))}; }
inline Vec finish_quads(Vec a, Vec b, Vec c, Vec d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v));
  const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512d ab2 = _mm512_castps_pd(ab), cd2 = _mm512_castps_pd(cd);
  const __m512 all =
      _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab2, cd2)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab2, cd2)));
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all)};
}

#elif defined(__AVX2__)

inline void turn_quads(Vec* rows) {
  const Vec a = rows[0], b = rows[1], c = rows[2], d = rows[3];
  rows[0] = {_mm256_permute2f128_ps(a.lo, b.lo, 0x20), _mm256_permute2f128_ps(c.lo, d.lo, 0x20)};
  rows[1] = {_mm256_permute2f128_ps(a.lo, b.lo, 0x31), _mm256_permute2f128_ps(c.lo, d.lo, 0x31)};
  rows[2] = {_mm256_permute2f128_ps(a.hi, b.hi, 0x20), _mm256_permute2f128_ps(c.hi, d.hi, 0x20)};
  rows[3] = {_mm256_permute2f128_ps(a.hi, b.hi, 0x31), _mm256_permute2f128_ps(c.hi, d.hi, 0x31)};
}
inline Vec load_quad(const float* p) {
  const __m256 quad = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return {quad, quad};
}
// Eight numbers' totals: of each of the four registers, those of its two quads.
inline __m256 finish8(__m256 a, __m256 b, __m256 c, __m256 d) {
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d ab2 = _mm256_castps_pd(ab), cd2 = _mm256_castps_pd(cd);
  const __m256 all =
      _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(ab2, cd2)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab2, cd2)));
  return _mm256_permutevar8x32_ps(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline Vec finish_quads(Vec a, Vec b, Vec c, Vec d) {
  // Of each, the first two numbers, and the last two.
  const __m256d lo = _mm256_castps_pd(finish8(a.lo, b.lo, c.lo, d.lo));
  const __m256d hi = _mm256_castps_pd(finish8(a.hi, b.hi, c.hi, d.hi));
  const __m256d ac = _mm256_unpacklo_pd(lo, hi), bd = _mm256_unpackhi_pd(lo, hi);
  return {_mm256_castpd_ps(_mm256_permute2f128_pd(ac, bd, 0x20)),
          _mm256_castpd_ps(_mm256_permute2f128_pd(ac, bd, 0x31))};
}

#else

inline void turn_quads(Vec* rows) {
  float from[4][kLanes], to[4][kLanes];
  for (int i = 0; i < 4; ++i) store(from[i], rows[i]);
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < kLanes; ++j) to[j / 4][4 * i + j % 4] = from[i][j];
  for (int i = 0; i < 4; ++i) rows[i] = load(to[i]);
}
inline Vec load_quad(const float* p) {
  float quads[kLanes];
  for (int i = 0; i < kLanes; ++i) quads[i] = p[i % 4];
  return load(quads);
}
inline Vec finish_quads(Vec a, Vec b, Vec c, Vec d) {
  const Floats vecs[4] = {a.v, b.v, c.v, d.v};
  float totals[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    const Floats& v = vecs[i / 4];
    const int quad = i % 4 * 4;
    totals[i] = (v[quad] + v[quad + 2]) + (v[quad + 1] + v[quad + 3]);
  }
  return load(totals);
}

#endif

}  // namespace QUIRE_ISA
}  // namespace quire

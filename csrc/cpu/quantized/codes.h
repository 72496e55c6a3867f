// Codes of a quantized row as floats, for each instruction set, from any address:
//   bytes16, nibbles16     sixteen codes of 8 or 4 bits as they are; of a byte, the lower four bits come first
//   lookup16(table, p)     sixteen codes of 4 bits, looked up in sixteen floats
//   gather16(p, places)    sixteen floats, by their places
//   small_floats16         sixteen 8-bit floats (e4m3, OCP 8-bit floating point 1.0), but for NaN
//   store32                two Vecs, one behind the other
#pragma once

#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

#if defined(__AVX2__)

inline __m128i load_codes(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }

// Sixteen codes, a byte each, whose upper four bits say nothing.
inline __m128i spread_nibbles(const uint8_t* p) {
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return _mm_unpacklo_epi8(pairs, _mm_srli_epi16(pairs, 4));
}

// An e4m3 has an fp16's form when it is moved: sign, exponent less 8, mantissa. 256 is 2 to the power 8.
inline __m256i small_halves16(const uint8_t* p) {
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load_codes(p)), 8);
  return _mm256_and_si256(_mm256_srai_epi16(words, 1), _mm256_set1_epi16(static_cast<short>(0xbfff)));
}

#endif

template <class T>
inline void store32(T* to, Vec a, Vec b) {
#if defined(__AVX512BF16__)
  if constexpr (__is_base_of(bf16, T)) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(b.v, a.v));
    return;
  }
#endif
  store(to, a);
  store(to + kLanes, b);
}

#if defined(__AVX512F__)

inline Vec bytes16(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_codes(p)))}; }
inline Vec nibbles16(const uint8_t* p) {
  const __m128i codes = _mm_and_si128(spread_nibbles(p), _mm_set1_epi8(15));
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes))};
}
inline Vec lookup16(Vec table, const uint8_t* p) {
  return {_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(spread_nibbles(p)), table.v)};
}
inline Vec gather16(const void* p, const int32_t* places) {
  return {_mm512_i32gather_ps(_mm512_loadu_si512(places), p, 4)};
}
inline Vec small_floats16(const uint8_t* p) {
  return {_mm512_mul_ps(_mm512_cvtph_ps(small_halves16(p)), _mm512_set1_ps(256))};
}

#elif defined(__AVX2__)

inline Vec floats_of(__m128i codes) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))};
}
inline Vec bytes16(const uint8_t* p) { return floats_of(load_codes(p)); }
inline Vec nibbles16(const uint8_t* p) { return floats_of(_mm_and_si128(spread_nibbles(p), _mm_set1_epi8(15))); }
inline __m256 lookup8(Vec table, __m256i codes) {
  const __m256 lower = _mm256_permutevar8x32_ps(table.lo, codes), upper = _mm256_permutevar8x32_ps(table.hi, codes);
  return _mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}
inline Vec lookup16(Vec table, const uint8_t* p) {
  const __m128i codes = spread_nibbles(p);
  return {lookup8(table, _mm256_cvtepu8_epi32(codes)), lookup8(table, _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)))};
}
inline Vec gather16(const void* p, const int32_t* places) {
  const float* from = static_cast<const float*>(p);
  const __m256i* all = reinterpret_cast<const __m256i*>(places);
  return {_mm256_i32gather_ps(from, _mm256_loadu_si256(all), 4),
          _mm256_i32gather_ps(from, _mm256_loadu_si256(all + 1), 4)};
}
inline Vec small_floats16(const uint8_t* p) {
  const __m256i halves = small_halves16(p);
  const Vec wide = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                    _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
  return mul(wide, set1(256));
}

#else

inline Vec bytes16(const uint8_t* p) {
  float to[kLanes];
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<float>(p[i]);
  return load(to);
}
inline Vec nibbles16(const uint8_t* p) {
  float to[kLanes];
  for (int i = 0; i < kLanes; ++i) to[i] = static_cast<float>(p[i / 2] >> i % 2 * 4 & 15);
  return load(to);
}
inline Vec lookup16(Vec table, const uint8_t* p) {
  float from[kLanes], to[kLanes];
  store(from, table);
  for (int i = 0; i < kLanes; ++i) to[i] = from[p[i / 2] >> i % 2 * 4 & 15];
  return load(to);
}
inline Vec gather16(const void* p, const int32_t* places) {
  float to[kLanes];
  for (int i = 0; i < kLanes; ++i)
    __builtin_memcpy(to + i, static_cast<const char*>(p) + places[i] * sizeof(float), sizeof(float));
  return load(to);
}
inline Vec small_floats16(const uint8_t* p) {
  uint16_t halves[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    halves[i] = static_cast<uint16_t>((p[i] & 128) << 8 | (p[i] & 127) << 7);
  }
  return mul(load(reinterpret_cast<const fp16*>(halves)), set1(256));
}

#endif

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

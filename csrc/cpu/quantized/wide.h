// The registers that products of bytes are made in, and what is done with them.
//
// QUIRE_WIDE: their bytes, the most that there are where none are asked for; not defined without such products. WideInts,
// WideFloats: lanes of 32 bits. vpdpbusd adds products of four unsigned bytes with four signed ones to each lane. Where a
// processor has it not, vpmaddubsw adds two products in 16 bits, which must suffice: signed codes of eight bits give
// their signs to the other factor then.
#pragma once

#include "cpu/quantized/numbers.h"

#if defined(QUIRE_WIDE)
#elif defined(__AVX512VNNI__)
#define QUIRE_WIDE 64
#elif defined(__AVX2__)
#define QUIRE_WIDE 32
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define QUIRE_HAS_DPBUSD
#endif

#if defined(QUIRE_WIDE)

namespace quire {
namespace QUIRE_ISA {
namespace {

inline __m128i load16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

#if QUIRE_WIDE == 64

using WideInts = __m512i;
using WideFloats = __m512;

inline WideInts bytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline WideInts all_lanes(int a) { return _mm512_set1_epi32(a); }
inline WideFloats all_lanes(float a) { return _mm512_set1_ps(a); }
inline WideFloats to_floats(WideInts a) { return _mm512_cvtepi32_ps(a); }
inline WideInts add(WideInts a, WideInts b) { return _mm512_add_epi32(a, b); }
inline WideFloats add(WideFloats a, WideFloats b) { return _mm512_add_ps(a, b); }
inline WideInts mul(WideInts a, WideInts b) { return _mm512_mullo_epi32(a, b); }
inline WideFloats mul(WideFloats a, WideFloats b) { return _mm512_mul_ps(a, b); }
inline WideFloats fma(WideFloats a, WideFloats b, WideFloats c) { return _mm512_fmadd_ps(a, b, c); }
// Of each lane's two numbers of 16 bits, the products' sum.
inline WideInts mul_pairs(WideInts a, WideInts b) { return _mm512_madd_epi16(a, b); }

constexpr bool kSignedBytes = false;
inline WideInts add_products(WideInts sums, WideInts codes, WideInts x) { return _mm512_dpbusd_epi32(sums, codes, x); }

#else

using WideInts = __m256i;
using WideFloats = __m256;

inline WideInts bytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline WideInts all_lanes(int a) { return _mm256_set1_epi32(a); }
inline WideFloats all_lanes(float a) { return _mm256_set1_ps(a); }
inline WideFloats to_floats(WideInts a) { return _mm256_cvtepi32_ps(a); }
inline WideInts add(WideInts a, WideInts b) { return _mm256_add_epi32(a, b); }
inline WideFloats add(WideFloats a, WideFloats b) { return _mm256_add_ps(a, b); }
inline WideInts mul(WideInts a, WideInts b) { return _mm256_mullo_epi32(a, b); }
inline WideFloats mul(WideFloats a, WideFloats b) { return _mm256_mul_ps(a, b); }
inline WideFloats fma(WideFloats a, WideFloats b, WideFloats c) { return _mm256_fmadd_ps(a, b, c); }
inline WideInts mul_pairs(WideInts a, WideInts b) { return _mm256_madd_epi16(a, b); }

#if defined(QUIRE_HAS_DPBUSD)
constexpr bool kSignedBytes = false;
inline WideInts add_products(WideInts sums, WideInts codes, WideInts x) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
  return _mm256_dpbusd_epi32(sums, codes, x);
#endif
}
#else
constexpr bool kSignedBytes = true;

// Products of two neighbours each, added up in 16 bits.
template <bool kSigned>
inline __m256i pairs_of_products(__m256i codes, __m256i x) {
  // The largest sum is 2 * 128 * 127, since no code of x is -128.
  if constexpr (kSigned) return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
  return _mm256_maddubs_epi16(codes, x);
}
// Keeps the compiler from adding whole numbers up in another order, in which too many of them are alive at once.
inline __m256i in_order(__m256i sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#else
  asm("" : "+x"(sum));
#endif
  return sum;
}
inline __m256i sums_of_pairs(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

#endif

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

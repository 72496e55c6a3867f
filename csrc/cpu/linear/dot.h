// The registers of a dot product, for each instruction set and element type:
//   Dot<T>::Sum       the partial sums of one dot product, one in each of kSumLanes lanes
//   Dot<T>::Wide      what multiplications take: T itself, or float where the processor cannot multiply T
//   kStep, kParts     a step is kStep elements of both factors, multiplied in kParts parts, one after the other
//   load<part>        a part of a step's elements as they lie; load_first pads with zeros past n
//   load_wide<part>   the same from a step that store_wide<part> has kept, once for many multiplications
//   multiply_add      sum += x * w, lane by lane
//   reduce4           the totals of four Sums, each by the same tree of additions, in a Vec's first four lanes
// kTileTokens x kTileRows dot products are kept in registers at once.
//
// With kHasUnits, a step can also be taken as units of 32 bits (units.h), be moved about, and then be split:
// load<part>(p) is part<part>(units(p)). A register has kQuads times four of them:
//   turn_quads        the quads of kQuads registers, transposed in place
//   load_quad         four floats, in every quad
//   finish4           of four Sums whose quads have each four partial sums of a number: the totals of the first, then
//                     those of the second, and so on; quads added up in kQuadOrder before, the tree is reduce4's
#pragma once

#include "cpu/common/split_pairs.h"
#include "cpu/common/units.h"

namespace quire {
namespace QUIRE_ISA {

#if defined(__AVX512F__)

constexpr int kTileTokens = 6, kTileRows = 4;

struct Dot512 {
  using Sum = __m512;
  static constexpr int kSumLanes = 16;

  static Sum zero() { return _mm512_setzero_ps(); }

  // Quads 0 + 2 and 1 + 3, these two, then in the same way the four lanes that are left.
  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    __m512 all = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0x4e));
    all = _mm512_add_ps(all, _mm512_permute_ps(all, 0xb1));
    return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), all)};
  }
};

struct FloatDot : Dot512 {
  using Wide = float;
  using Operand = __m512;
  static constexpr bool kHasUnits = true;
  static constexpr int kQuads = 4, kQuadOrder[kQuads] = {0, 2, 1, 3};

  static Operand load_floats(const float* p) { return _mm512_loadu_ps(p); }
  static void store_floats(float* p, Operand a) { _mm512_storeu_ps(p, a); }
  static Operand load_quad(const float* p) { return QUIRE_ISA::load_quad(p).v; }
  static Sum add(Sum a, Sum b) { return _mm512_add_ps(a, b); }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return _mm512_fmadd_ps(x, w, sum); }
  static void turn_quads(Operand* rows) {
    Vec turned[4] = {{rows[0]}, {rows[1]}, {rows[2]}, {rows[3]}};
    QUIRE_ISA::turn_quads(turned);
    for (int i = 0; i < 4; ++i) rows[i] = turned[i].v;
  }
  static Sum finish4(Sum a, Sum b, Sum c, Sum d) { return finish_quads({a}, {b}, {c}, {d}).v; }
};

template <class T>
struct DotUnits : FloatDot {
  static constexpr int kStep = Units<T>::kStep, kParts = Units<T>::kParts;
  static Operand units(const T* p) { return Units<T>::load(p).v; }
  static Operand units(const T* p, int n) { return Units<T>::load(p, n).v; }
  template <int kPart>
  static Operand part(Operand units) {
    return Units<T>::template part<kPart>({units}).v;
  }
};

#elif defined(__AVX2__)

constexpr int kTileTokens = 3, kTileRows = 4;

struct FloatDot {
  using Sum = __m256;
  using Wide = float;
  using Operand = __m256;
  static constexpr bool kHasUnits = true;
  static constexpr int kSumLanes = 8;
  static constexpr int kQuads = 2, kQuadOrder[kQuads] = {0, 1};

  static Sum zero() { return _mm256_setzero_ps(); }
  static Operand load_floats(const float* p) { return _mm256_loadu_ps(p); }
  static void store_floats(float* p, Operand a) { _mm256_storeu_ps(p, a); }
  static Operand load_quad(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
  static Sum add(Sum a, Sum b) { return _mm256_add_ps(a, b); }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return _mm256_fmadd_ps(x, w, sum); }
  static void turn_quads(Operand* rows) {
    const __m256 first = _mm256_permute2f128_ps(rows[0], rows[1], 0x20);
    rows[1] = _mm256_permute2f128_ps(rows[0], rows[1], 0x31);
    rows[0] = first;
  }
  static Sum finish4(Sum a, Sum b, Sum c, Sum d) { return finish8(a, b, c, d); }

  // Both quads, then lanes 0 + 2 and 1 + 3, and these two.
  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    const __m256 ab = _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    const __m256 cd = _mm256_add_ps(_mm256_permute2f128_ps(c, d, 0x20), _mm256_permute2f128_ps(c, d, 0x31));
    __m256 all = _mm256_add_ps(_mm256_unpacklo_ps(ab, cd), _mm256_unpackhi_ps(ab, cd));
    all = _mm256_add_ps(all, _mm256_permute_ps(all, 0x4e));
    const __m128 totals = _mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    return {_mm256_castps128_ps256(totals), _mm256_setzero_ps()};
  }
};

template <class T>
struct DotUnits : FloatDot {
  static constexpr int kStep = 8, kParts = 1;
  static Operand units(const float* p) { return _mm256_loadu_ps(p); }
  static Operand units(const fp16* p) { return widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), fp16{}); }
  static Operand units(const T* p, int n) {
    T buffer[kStep] = {};
    __builtin_memcpy(buffer, p, n * sizeof(T));
    return units(buffer);
  }
  template <int>
  static Operand part(Operand units) {
    return units;
  }
};

template <>
struct DotUnits<bf16> : FloatDot {
  static constexpr int kStep = 16, kParts = 2;
  static Operand units(const bf16* p) { return _mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static Operand units(const bf16* p, int n) {
    bf16 buffer[kStep] = {};
    __builtin_memcpy(buffer, p, n * sizeof(bf16));
    return units(buffer);
  }
  template <int kPart>
  static Operand part(Operand units) {
    return Units<bf16>::part8<kPart>(units);
  }
};

#else

constexpr int kTileTokens = 2, kTileRows = 4;

struct FloatDot {
  using Sum = Vec;
  using Wide = float;
  using Operand = Vec;
  static constexpr bool kHasUnits = false;
  static constexpr int kSumLanes = kLanes;

  static Sum zero() { return QUIRE_ISA::zero(); }
  static Operand load_floats(const float* p) { return QUIRE_ISA::load(p); }
  static void store_floats(float* p, Operand a) { QUIRE_ISA::store(p, a); }
  static Sum multiply_add(Sum sum, Operand x, Operand w) { return fma(x, w, sum); }
  static Vec reduce4(Sum a, Sum b, Sum c, Sum d) {
    return {Floats{reduce_add(a), reduce_add(b), reduce_add(c), reduce_add(d)}};
  }
};

template <class T>
struct DotUnits : FloatDot {
  static constexpr int kStep = kLanes, kParts = 1;
  static Operand units(const T* p) { return QUIRE_ISA::load(p); }
  static Operand units(const T* p, int n) { return QUIRE_ISA::load_first(p, n); }
  template <int>
  static Operand part(Operand units) {
    return units;
  }
};

#endif

template <class T>
struct Dot : DotUnits<T> {
  using Units = DotUnits<T>;
  using typename Units::Operand;
  template <int kPart>
  static Operand load(const T* p) {
    return Units::template part<kPart>(Units::units(p));
  }
  template <int kPart>
  static Operand load_first(const T* p, int n) {
    return Units::template part<kPart>(Units::units(p, n));
  }
  template <int kPart>
  static Operand load_wide(const float* p) {
    return Units::load_floats(p + kPart * Units::kSumLanes);
  }
  template <int kPart>
  static void store_wide(float* p, Operand a) {
    Units::store_floats(p + kPart * Units::kSumLanes, a);
  }
};

#if defined(__AVX512BF16__)
// Pairs as they lie, which the processor multiplies. The matrix unit takes all products of units.
template <>
struct Dot<bf16> : FloatDot {
  using Wide = bf16;
#if defined(__AMX_BF16__)
  static constexpr bool kHasUnits = false;
#endif
  static constexpr int kStep = 32, kParts = 1;
  static Operand units(const bf16* p) { return Units<bf16>::load(p).v; }
  static Operand units(const bf16* p, int n) { return Units<bf16>::load(p, n).v; }
  template <int>
  static Operand part(Operand units) {
    return units;
  }
  template <int>
  static Operand load(const bf16* p) {
    return units(p);
  }
  template <int>
  static Operand load_first(const bf16* p, int n) {
    return units(p, n);
  }
  template <int>
  static Operand load_wide(const bf16* p) {
    return units(p);
  }
  static Sum multiply_add(Sum sum, Operand x, Operand w) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(x), (__m512bh)_mm512_castps_si512(w));
  }
};

template <>
struct DotUnits<SplitPairs> : FloatDot {
  static constexpr int kStep = 32, kParts = 2;
  static Operand units(const SplitPairs* p) { return Units<SplitPairs>::load(p).v; }
  static Operand units(const SplitPairs* p, int n) { return Units<SplitPairs>::load(p, n).v; }
  template <int kPart>
  static Operand part(Operand units) {
    return Units<SplitPairs>::part<1 - kPart>({units}).v;
  }
};
#endif

// Whether operands cost instructions before they can be multiplied.
template <class T>
constexpr bool kWidens = !__is_same(T, typename Dot<T>::Wide);

}  // namespace QUIRE_ISA
}  // namespace quire

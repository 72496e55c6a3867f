// Keys and queries as the scores' inner loop wants them.
//
// A unit is what one multiplication takes of a row: one element widened to float or, where the processor has dot
// products of bfloat16, a pair of elements. A key tile is packed unit by unit, kKeyTile keys side by side, so that the
// lanes of a register are keys: each score is then one lane's chain of additions along D, and nothing is left to add up
// across lanes. Turning keys into columns costs a few shuffles per key; a decoded token waits for memory meanwhile.
#pragma once

#include "kernels.h"
#include "simd.h"
#include "transpose.h"

namespace quire {
namespace QUIRE_ISA {

// Keys that one step of the online softmax covers. Tiles lie at multiples of it from position 0.
constexpr int kKeyTile = 64;

template <class T>
struct Operands {
  using Unit = float;
  using Operand = Vec;
  static constexpr int kElements = 1;  // of a row, in a unit

  static Vec load(const float* units) { return QUIRE_ISA::load(units); }
  static Vec splat(float unit) { return set1(unit); }
  static Vec multiply_add(Vec q, Vec k, Vec sum) { return fma(q, k, sum); }

  // Sixteen units of a row, n elements of which exist. They are moved about as floats, and never computed with.
  static Vec load_row(const T* row, int64_t n) {
    return n >= kLanes ? QUIRE_ISA::load(row) : load_first(row, static_cast<int>(n));
  }
  static void store(float* units, Vec a) { QUIRE_ISA::store(units, a); }
};

#if defined(__AVX512BF16__)

template <>
struct Operands<bf16> {
  using Unit = uint32_t;
  using Operand = __m512bh;
  static constexpr int kElements = 2;

  static Operand load(const uint32_t* units) { return (__m512bh)_mm512_loadu_si512(units); }
  static Operand splat(uint32_t unit) { return (__m512bh)_mm512_set1_epi32(static_cast<int>(unit)); }
  static Vec multiply_add(Operand q, Operand k, Vec sum) { return {_mm512_dpbf16_ps(sum.v, q, k)}; }

  static Vec load_row(const bf16* row, int64_t n) {
    const __mmask32 mask = n >= 32 ? ~__mmask32{0} : static_cast<__mmask32>((uint64_t{1} << n) - 1);
    return {_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(mask, row))};
  }
  static void store(uint32_t* units, Vec a) { _mm512_storeu_si512(units, _mm512_castps_si512(a.v)); }
};

#endif

// Into the second-level cache: the first is full of the tile at hand. Spread over the work, one line here and there:
// in bursts, prefetches wait for one another and the loads wait for them.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T>
inline int64_t unit_count(int64_t head_dim) {
  return (head_dim + Operands<T>::kElements - 1) / Operands<T>::kElements;
}

// Sixteen keys as columns of packed [units][kKeyTile]; sixteen others are asked for meanwhile.
template <class T>
inline void pack_keys(const T* const* rows, const T* const* ahead, int64_t head_dim,
                      typename Operands<T>::Unit* packed) {
  using O = Operands<T>;
  const int64_t units = unit_count<T>(head_dim);
  for (int64_t u = 0; u < units; u += kLanes) {
    const int64_t first = u * O::kElements;
    Vec tile[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      tile[i] = O::load_row(rows[i] + first, head_dim - first);
      prefetch(ahead[i] + first);
    }
    transpose(tile);
    if (units - u >= kLanes) {
      for (int i = 0; i < kLanes; ++i) O::store(packed + (u + i) * kKeyTile, tile[i]);
    } else {
      for (int64_t i = 0; i < units - u; ++i) O::store(packed + (u + i) * kKeyTile, tile[i]);
    }
  }
}

// One query row, its units padded with zeros to a multiple of sixteen.
template <class T>
inline void pack_query(const T* row, int64_t head_dim, typename Operands<T>::Unit* packed) {
  using O = Operands<T>;
  for (int64_t d = 0; d < head_dim; d += kLanes * O::kElements, packed += kLanes)
    O::store(packed, O::load_row(row + d, head_dim - d));
}

}  // namespace QUIRE_ISA
}  // namespace quire

// Keys and queries as the scores' inner loop wants them.
//
// A unit is what one multiplication takes of a row: one element widened to float or, where the processor has dot
// products of bfloat16, a pair of elements. A key tile is packed unit by unit, kKeyTile keys side by side, so that the
// lanes of a register are keys: each score is then one lane's chain of additions along D, and nothing is left to add up
// across lanes. Turning keys into columns costs a few shuffles per key; a decoded token waits for memory meanwhile.
#pragma once

#include "kernels.h"
#include "simd.h"

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

// Sixteen vectors, transposed in place.
#if defined(__AVX512F__)

inline void transpose(Vec* rows) {
  __m512 pairs[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  const auto low = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  const auto high = [](__m512 a, __m512 b) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(b)));
  };
  // quads[4 i + j]: column j of each quarter of rows 4 i .. 4 i + 3.
  __m512 quads[16];
  for (int i = 0; i < 16; i += 4) {
    quads[i] = low(pairs[i], pairs[i + 2]);
    quads[i + 1] = high(pairs[i], pairs[i + 2]);
    quads[i + 2] = low(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = high(pairs[i + 1], pairs[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512 ab = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0x44);
    const __m512 ab2 = _mm512_shuffle_f32x4(quads[j], quads[4 + j], 0xee);
    const __m512 cd = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0x44);
    const __m512 cd2 = _mm512_shuffle_f32x4(quads[8 + j], quads[12 + j], 0xee);
    rows[j].v = _mm512_shuffle_f32x4(ab, cd, 0x88);
    rows[4 + j].v = _mm512_shuffle_f32x4(ab, cd, 0xdd);
    rows[8 + j].v = _mm512_shuffle_f32x4(ab2, cd2, 0x88);
    rows[12 + j].v = _mm512_shuffle_f32x4(ab2, cd2, 0xdd);
  }
}

#elif defined(__AVX2__)

inline void transpose8(const __m256* rows, __m256* columns) {
  __m256 quads[8];
  for (int i = 0; i < 8; i += 4) {
    const __m256 ab = _mm256_unpacklo_ps(rows[i], rows[i + 1]), ab2 = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    const __m256 cd = _mm256_unpacklo_ps(rows[i + 2], rows[i + 3]);
    const __m256 cd2 = _mm256_unpackhi_ps(rows[i + 2], rows[i + 3]);
    quads[i] = _mm256_shuffle_ps(ab, cd, 0x44);
    quads[i + 1] = _mm256_shuffle_ps(ab, cd, 0xee);
    quads[i + 2] = _mm256_shuffle_ps(ab2, cd2, 0x44);
    quads[i + 3] = _mm256_shuffle_ps(ab2, cd2, 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    columns[j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
    columns[4 + j] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
  }
}

inline void transpose(Vec* rows) {
  __m256 quarter[4][8], turned[4][8];  // upper left, upper right, lower left, lower right
  for (int i = 0; i < 8; ++i) {
    quarter[0][i] = rows[i].lo, quarter[1][i] = rows[i].hi;
    quarter[2][i] = rows[8 + i].lo, quarter[3][i] = rows[8 + i].hi;
  }
  for (int i = 0; i < 4; ++i) transpose8(quarter[i], turned[i]);
  for (int i = 0; i < 8; ++i) {
    rows[i] = {turned[0][i], turned[2][i]};
    rows[8 + i] = {turned[1][i], turned[3][i]};
  }
}

#else

inline void transpose(Vec* rows) {
  float from[16][16], to[16][16];
  for (int i = 0; i < 16; ++i) store(from[i], rows[i]);
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < 16; ++i) rows[i] = load(to[i]);
}

#endif

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

// What attention computes between two products of pairs of bf16: weights of scores, and the order of what they weigh.
#pragma once

#if defined(__AVX512BF16__)

#include "cpu/attention/attention_rows.h"

namespace quire {
namespace QUIRE_ISA {

// 2 to the x within 4e-6 of itself; 1 for 0, 0 for -inf.
inline Vec power_of_two(Vec x) {
  const Vec r{_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)};  // x - floor(x), of -inf 0
  // Fitted on 0 .. 1, with 1 at 0.
  Vec p = fma(set1(0.013426697f), r, set1(0.052242443f));
  p = fma(p, r, set1(0.24128023f));
  p = fma(p, r, set1(0.69304484f));
  p = fma(p, r, set1(1.0f));
  return {_mm512_scalef_ps(p.v, x.v)};
}

// The greatest number of each of sixteen registers.
inline Vec greatest_of_each(Vec (&rows)[kLanes]) {
  __m512 quads[4];
  for (int i = 0; i < 4; ++i) {
    turn_quads(rows + 4 * i);
    quads[i] = max(max(rows[4 * i], rows[4 * i + 1]), max(rows[4 * i + 2], rows[4 * i + 3])).v;
  }
  const auto pairs = [](__m512 a, __m512 b) {
    return _mm512_castps_pd(_mm512_max_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  };
  const __m512d ab = pairs(quads[0], quads[1]), cd = pairs(quads[2], quads[3]);
  const __m512 all =
      _mm512_max_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), all)};
}

// Of 32 values of two keys, pairs: first and third quads of each eight, then the others.
inline void pair_values(__m512i a, __m512i b, Vec* pairs) {
  pairs[0].v = _mm512_castsi512_ps(_mm512_unpacklo_epi16(a, b));
  pairs[1].v = _mm512_castsi512_ps(_mm512_unpackhi_epi16(a, b));
}

// The order in which a record has the values that were weighed in such pairs.
struct PairOrder {
  static constexpr int kStep = 2 * kLanes, kParts = 2;
  static void in_order(Vec* parts) {
    const __m512 a = parts[0].v, b = parts[1].v;
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    // A sum of zeros has the sign of them all or none, by which keys were left out: here, none.
    parts[0].v = _mm512_add_ps(_mm512_permutex2var_ps(a, first, b), _mm512_setzero_ps());
    parts[1].v = _mm512_add_ps(_mm512_permutex2var_ps(a, second, b), _mm512_setzero_ps());
  }
};

// Keys that a row sees of a tile, a bit each.
inline uint64_t mask_of(TileRange seen) {
  if (seen.empty()) return 0;
  return ~uint64_t{0} >> (kKeyTile - (seen.end - seen.begin)) << seen.begin;
}

}  // namespace QUIRE_ISA
}  // namespace quire

#endif

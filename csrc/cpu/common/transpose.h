// Sixteen vectors of sixteen numbers of 32 bits, transposed in place. They are moved about as floats, and never
// computed with.
#pragma once

#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {

#if defined(__AVX512F__)

inline void transpose(Vec* rows) {
  __m512 pairs[16];
#pragma GCC unroll 8
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
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    quads[i] = low(pairs[i], pairs[i + 2]);
    quads[i + 1] = high(pairs[i], pairs[i + 2]);
    quads[i + 2] = low(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = high(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
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

#endif

}  // namespace QUIRE_ISA
}  // namespace quire

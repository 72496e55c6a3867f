// The products of integer_products.h by AVX-512's vpdpbusd, with the very sums: a step of kStepRows rows, and rows of
// int8.
#pragma once

#include "cpu/quantized/step_tokens.h"

#if QUIRE_WIDE == 64

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kStepTokens = 8, kRowTokens = 6;

using Chains = __m512;  // lanes 4 * row + chain

inline __m512i broadcast4(const int* p) { return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)); }
inline __m512 broadcast4(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

// Lane 4 * r + i: the sum of the lanes i, i + 4, i + 8, i + 12 of row r.
inline __m512i reduce_rows(__m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i ab = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xee));
  const __m512i cd = _mm512_add_epi32(_mm512_shuffle_i32x4(c, d, 0x44), _mm512_shuffle_i32x4(c, d, 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
}

// Of each four lanes (0 + 1) + (2 + 3), in the first four lanes.
inline Vec add_chains(__m512 a) {
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0xb1));
  a = _mm512_add_ps(a, _mm512_permute_ps(a, 0x4e));
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), a)};
}

template <int kOffset>
inline __m512i times_offset(__m512i sums) {
  static_assert(kOffset == 0 || kOffset == 12 || (kOffset & (kOffset - 1)) == 0, "others need a multiplication");
  if constexpr (kOffset == 12) return _mm512_add_epi32(_mm512_slli_epi32(sums, 3), _mm512_slli_epi32(sums, 2));
  return _mm512_slli_epi32(sums, __builtin_ctz(kOffset | 1 << 30));
}

// What kinds whose halves have factors add to the chains. total: the products of all; of_first, of_second: the sums of the
// token's codes in both halves.
template <class Kind, class Step>
inline __attribute__((always_inline)) __m512 add_halves(__m512 acc, __m512i total, __m512i of_first, __m512i of_second,
                                                        const Step& step, __m512 scale) {
  acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(step.scale, scale), acc);
  if constexpr (Kind::kMinimum) {
    const __m512i low =
        _mm512_add_epi32(_mm512_mullo_epi32(of_first, step.low[0]), _mm512_mullo_epi32(of_second, step.low[1]));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_mul_ps(step.minimum, scale), acc);
  }
  return acc;
}

// A token's share of a step, by one of its codes: acc's lanes are the chains of all rows.
template <class Kind>
inline __attribute__((always_inline)) __m512 add_codes(__m512 acc, const Step<Kind::kHalves>& step,
                                                       const StepCodes& x) {
  constexpr int kOffset = Steps<Kind>::kOffset;
  const __m512i first = _mm512_load_si512(x.codes[0]), second = _mm512_load_si512(x.codes[1]);
  const __m512 scale = broadcast4(x.scales);
  __m512i sums[kStepRows], total;
  if constexpr (Kind::kHalves) {
    const __m512i of_first = broadcast4(x.first_sums);
    const __m512i of_second = _mm512_sub_epi32(broadcast4(x.sums), of_first);
    const __m512i zero = _mm512_setzero_si512();
    // Taken off once, in four of the lanes that are added up.
    const __m512i off[2] = {_mm512_mask_sub_epi32(zero, 15, zero, times_offset<kOffset>(of_first)),
                            _mm512_mask_sub_epi32(zero, 15, zero, times_offset<kOffset>(of_second))};
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r) {
      const __m512i a = _mm512_dpbusd_epi32(kOffset ? off[0] : zero, step.codes[r][0], first);
      const __m512i b = _mm512_dpbusd_epi32(kOffset ? off[1] : zero, step.codes[r][1], second);
      sums[r] = _mm512_add_epi32(_mm512_mullo_epi32(a, step.factors[r][0]), _mm512_mullo_epi32(b, step.factors[r][1]));
    }
    total = reduce_rows(sums[0], sums[1], sums[2], sums[3]);
    return add_halves<Kind>(acc, total, of_first, of_second, step, scale);
  } else {
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r)
      sums[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), step.codes[r][0], first),
                                    step.codes[r][1], second);
    total = reduce_rows(sums[0], sums[1], sums[2], sums[3]);
    if constexpr (kOffset > 0) total = _mm512_sub_epi32(total, times_offset<kOffset>(broadcast4(x.sums)));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(step.scale, scale), acc);
    if constexpr (Kind::kMinimum) acc = _mm512_fmadd_ps(step.minimum, broadcast4(x.scaled_sums), acc);
    return acc;
  }
}

// A step for several tokens. A register of codes has four bytes of each group of all rows, so that a token's products
// are added where its chains are, and no lanes are added up afterwards.
template <bool kHalves>
struct alignas(64) TurnedStep {
  __m512i codes[2][4];  // of both halves: their first four bytes, the next four, ..
  __m512 scale, minimum;
};
template <>
struct alignas(64) TurnedStep<true> {
  __m512i codes[2][4];
  __m512 scale, minimum;
  __m512i factors[2], low[2];  // of all rows
};

// to[quad] has quad number `quad` of each row.
inline void turn_quads(__m512i a, __m512i b, __m512i c, __m512i d, __m512i* to) {
  const __m512i ab = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
  const __m512i cd = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
  to[0] = _mm512_shuffle_i32x4(ab, cd, 0x88), to[1] = _mm512_shuffle_i32x4(ab, cd, 0xdd);
  to[2] = _mm512_shuffle_i32x4(ab_high, cd_high, 0x88), to[3] = _mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// A step as so many tokens take it.
template <class Kind, int kCount>
inline __attribute__((always_inline)) auto for_tokens(const Step<Kind::kHalves>& step) {
  if constexpr (kCount == 1) {
    return step;
  } else {
    TurnedStep<Kind::kHalves> turned;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half)
      turn_quads(step.codes[0][half], step.codes[1][half], step.codes[2][half], step.codes[3][half],
                 turned.codes[half]);
    turned.scale = step.scale, turned.minimum = step.minimum;
    if constexpr (Kind::kHalves) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i all = _mm512_mask_mov_epi32(step.factors[0][half], 0x00f0, step.factors[1][half]);
        all = _mm512_mask_mov_epi32(all, 0x0f00, step.factors[2][half]);
        turned.factors[half] = _mm512_mask_mov_epi32(all, 0xf000, step.factors[3][half]);
        turned.low[half] = step.low[half];
      }
    }
    return turned;
  }
}

// The products of a half of each group, added to `sums`: lanes 4 * row + group.
inline __attribute__((always_inline)) __m512i add_half(__m512i sums, const __m512i* codes, const int8_t* x) {
#pragma GCC unroll 4
  for (int quad = 0; quad < 4; ++quad)
    sums = _mm512_dpbusd_epi32(sums, codes[quad], _mm512_broadcast_i32x4(load16(x + 16 * quad)));
  return sums;
}

template <class Kind>
inline __attribute__((always_inline)) __m512 add_codes(__m512 acc, const TurnedStep<Kind::kHalves>& step,
                                                       const StepCodes& x) {
  constexpr int kOffset = Steps<Kind>::kOffset;
  const __m512i zero = _mm512_setzero_si512();
  const __m512 scale = broadcast4(x.scales);
  if constexpr (Kind::kHalves) {
    const __m512i of_first = broadcast4(x.first_sums);
    const __m512i of_second = _mm512_sub_epi32(broadcast4(x.sums), of_first);
    __m512i a = add_half(zero, step.codes[0], x.codes[0]), b = add_half(zero, step.codes[1], x.codes[1]);
    if constexpr (kOffset > 0) {
      a = _mm512_sub_epi32(a, times_offset<kOffset>(of_first));
      b = _mm512_sub_epi32(b, times_offset<kOffset>(of_second));
    }
    const __m512i total =
        _mm512_add_epi32(_mm512_mullo_epi32(a, step.factors[0]), _mm512_mullo_epi32(b, step.factors[1]));
    return add_halves<Kind>(acc, total, of_first, of_second, step, scale);
  } else {
    __m512i total = add_half(zero, step.codes[0], x.codes[0]);
    total = _mm512_add_epi32(total, add_half(zero, step.codes[1], x.codes[1]));
    if constexpr (kOffset > 0) total = _mm512_sub_epi32(total, times_offset<kOffset>(broadcast4(x.sums)));
    acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(step.scale, scale), acc);
    if constexpr (Kind::kMinimum) acc = _mm512_fmadd_ps(step.minimum, broadcast4(x.scaled_sums), acc);
    return acc;
  }
}

// The second codes' share of the groups that have them, a bit for each. step: as `for_tokens` gives it.
template <class Kind, class Step>
inline __attribute__((always_inline)) __m512 add_rest(__m512 acc, const Step& step, const StepCodes& rest, int groups) {
  const auto lanes = static_cast<__mmask16>(groups * 0x1111);
  return _mm512_mask_mov_ps(acc, lanes, add_codes<Kind>(acc, step, rest));
}

// Bytes of a row of int8; past the first `left`, whatever is there times a code of zero.
inline __m512i row_bytes_at(const uint8_t* p, int64_t left) {
  const __mmask64 there = left < 64 ? (uint64_t{1} << left) - 1 : ~uint64_t{0};
  return _mm512_xor_si512(_mm512_maskz_loadu_epi8(there, p), bytes(128));
}
constexpr int kRowOffset = 128;

inline __m512i add_row(__m512i sum, __m512i w, const int8_t* codes) {
  return _mm512_dpbusd_epi32(sum, w, _mm512_load_si512(codes));
}

inline __m128i totals_of_rows(const __m512i* sums) {
  __m512i total = reduce_rows(sums[0], sums[1], sums[2], sums[3]);
  total = _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0xb1)));
  total = _mm512_add_epi32(total, _mm512_shuffle_epi32(total, static_cast<_MM_PERM_ENUM>(0x4e)));
  return _mm512_castsi512_si128(
      _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), total));
}

inline Vec vec_of(__m128 four) { return {_mm512_castps128_ps512(four)}; }

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

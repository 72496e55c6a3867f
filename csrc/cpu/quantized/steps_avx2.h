// Rows of groups in registers of 256 bits: a step is 128 columns, four groups, of kStepRows rows.
//
// A register has a group's 32 codes in their order, so that each half of it is a lane of 128 bits. Codes are made
// unsigned by an offset, for instructions that multiply unsigned bytes with signed ones; without vpdpbusd, Q8_0's stay
// signed (see wide_avx2.h). What all rows have together is in lanes 4 * row + group, of two rows each.
#pragma once

#include "cpu/quantized/wide.h"

#if QUIRE_WIDE == 32

#include "cpu/common/scratch.h"
#include "cpu/quantized/groups.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kStepRows = 4, kStep = 128, kStepGroups = kStep / kGroup;
// Where a token's codes lie for a step: a group's first four, from four to the next four, from a half to the other.
constexpr int kGroupAt = 32, kFourApart = 4, kHalfApart = 16;

// Rows: the addresses of the blocks that have a step's columns.
using Rows = const uint8_t* const (&)[kStepRows];

template <bool kHalves>
struct alignas(32) Step {
  __m256i codes[kStepRows][kStepGroups];
  __m256 scale[2], minimum[2];
};
template <>
struct alignas(32) Step<true> {
  __m256i codes[kStepRows][kStepGroups];
  __m256 scale[2], minimum[2];
  __m256i factors[kStepRows], low[kStepRows];  // the first halves' of four groups, then the second ones'
};

inline __m256i load32(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// kBits bits of all bytes, from bit kAt on.
template <int kAt, int kBits>
inline __m256i bits_at(__m256i v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, kAt), bytes((1 << kBits) - 1));
}
inline __m256i bits_at(__m256i v, int at, int bits) {
  return _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi32_si128(at)), bytes((1 << bits) - 1));
}

// 16 bytes: the low halves, then the high ones.
inline __m256i nibbles_at(const uint8_t* p) {
  const __m256i both = _mm256_broadcastsi128_si256(load16(p));
  return _mm256_and_si256(_mm256_srlv_epi32(both, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4)), bytes(15));
}

// Bit i of 32 as bit 4 of byte i.
inline __m256i fifth_bits(const uint8_t* p) {
  const __m256i own =
      _mm256_shuffle_epi8(_mm256_set1_epi32(read<int>(p)),
                          _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
  const __m256i bit = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
  return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(own, bit), bit), bytes(16));
}

// The half-precision number at byte kAt of each of four blocks of kBytes, of two rows.
template <int kBytes, int kAt>
inline __m256 halves_of(const uint8_t* one, const uint8_t* other) {
  const auto at = [](const uint8_t* row, int block) { return read<int16_t>(row + block * kBytes + kAt); };
  return _mm256_cvtph_ps(_mm_setr_epi16(at(one, 0), at(one, 1), at(one, 2), at(one, 3), at(other, 0), at(other, 1),
                                        at(other, 2), at(other, 3)));
}
template <int kBytes, int kAt>
inline void take_halves(Rows rows, __m256* to) {
  to[0] = halves_of<kBytes, kAt>(rows[0], rows[1]), to[1] = halves_of<kBytes, kAt>(rows[2], rows[3]);
}

inline __m256 negative(__m256 a) { return _mm256_xor_ps(a, _mm256_set1_ps(-0.0f)); }

// kMost: the largest code.
// `take` is inlined everywhere: a step stays in registers, which a call would store for its caller to load.
template <class Kind>
struct Steps;

// Blocks of 32 columns; put(block) makes a register of one.
template <int kBytes, class Take>
inline void take_blocks(Rows rows, __m256i (*codes)[kStepGroups], const Take& take) {
#pragma GCC unroll 4
  for (int r = 0; r < kStepRows; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kStepGroups; ++g) codes[r][g] = take(rows[r] + g * kBytes);
}

template <>
struct Steps<Q4_0> {
  static constexpr int kOffset = 8, kMost = 15;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    take_blocks<18>(rows, to->codes, [](const uint8_t* block) { return nibbles_at(block + 2); });
    take_halves<18, 0>(rows, to->scale);
  }
};

template <>
struct Steps<Q4_1> {
  static constexpr int kOffset = 0, kMost = 15;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    take_blocks<20>(rows, to->codes, [](const uint8_t* block) { return nibbles_at(block + 4); });
    take_halves<20, 0>(rows, to->scale), take_halves<20, 2>(rows, to->minimum);
  }
};

template <>
struct Steps<Q5_0> {
  static constexpr int kOffset = 16, kMost = 31;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    take_blocks<22>(rows, to->codes,
                    [](const uint8_t* block) { return _mm256_or_si256(nibbles_at(block + 6), fifth_bits(block + 2)); });
    take_halves<22, 0>(rows, to->scale);
  }
};

template <>
struct Steps<Q5_1> {
  static constexpr int kOffset = 0, kMost = 31;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    take_blocks<24>(rows, to->codes,
                    [](const uint8_t* block) { return _mm256_or_si256(nibbles_at(block + 8), fifth_bits(block + 4)); });
    take_halves<24, 0>(rows, to->scale), take_halves<24, 2>(rows, to->minimum);
  }
};

template <>
struct Steps<Q8_0> {
  static constexpr int kOffset = kSignedBytes ? 0 : 128, kMost = kSignedBytes ? -128 : 255;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    take_blocks<34>(rows, to->codes, [](const uint8_t* block) {
      return kSignedBytes ? load32(block + 2) : _mm256_xor_si256(load32(block + 2), bytes(128));
    });
    take_halves<34, 0>(rows, to->scale);
  }
};

template <>
struct Steps<MxFp4> {
  static constexpr int kOffset = 12, kMost = 24;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    const __m256i values =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    take_blocks<17>(rows, to->codes,
                    [&](const uint8_t* block) { return _mm256_shuffle_epi8(values, nibbles_at(block + 1)); });
    alignas(32) float scales[kStepRows][kStepGroups];
    for (int r = 0; r < kStepRows; ++r)
      for (int g = 0; g < kStepGroups; ++g) scales[r][g] = half_e8m0(rows[r][17 * g]);
    to->scale[0] = _mm256_load_ps(scales[0]), to->scale[1] = _mm256_load_ps(scales[2]);
  }
};

// Scales and minimums of 6 bits, for the one or the other half of a block.
inline __attribute__((always_inline)) void take_six_bits(Rows rows, int second, Step<false>* to) {
  const __m128i a = load16(rows[0]), b = load16(rows[1]), c = load16(rows[2]), d = load16(rows[3]);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
  const __m128i one = _mm_unpackhi_epi64(ab, cd), two = _mm_unpacklo_epi64(ab_high, cd_high);
  const __m128i six = _mm_set1_epi8(63), four = _mm_set1_epi8(15), upper = _mm_set1_epi8(48);
  __m128i scales = _mm_and_si128(one, six), minimums = _mm_and_si128(two, six);
  if (second) {
    const __m128i three = _mm_unpackhi_epi64(ab_high, cd_high);
    scales = _mm_or_si128(_mm_and_si128(three, four), _mm_and_si128(_mm_srli_epi32(one, 2), upper));
    minimums =
        _mm_or_si128(_mm_and_si128(_mm_srli_epi32(three, 4), four), _mm_and_si128(_mm_srli_epi32(two, 2), upper));
  }
  // Of each row the factor of its scales, and that of its minimums.
  const __m256 both = _mm256_cvtph_ps(_mm_unpacklo_epi64(ab, cd));
  const auto floats = [](__m128i codes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(codes)); };
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const __m256i places = _mm256_setr_epi32(4 * pair, 4 * pair, 4 * pair, 4 * pair, 4 * pair + 2, 4 * pair + 2,
                                             4 * pair + 2, 4 * pair + 2);
    const __m256 scale = _mm256_permutevar8x32_ps(both, places);
    const __m256 minimum = _mm256_permutevar8x32_ps(both, _mm256_add_epi32(places, _mm256_set1_epi32(1)));
    to->scale[pair] = _mm256_mul_ps(scale, floats(scales));
    to->minimum[pair] = negative(_mm256_mul_ps(minimum, floats(minimums)));
    scales = _mm_srli_si128(scales, 8), minimums = _mm_srli_si128(minimums, 8);
  }
}

template <>
struct Steps<Q4_K> {
  static constexpr int kOffset = 0, kMost = 15;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<false>* to) {
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r) {
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m256i both = load32(rows[r] + 16 + 64 * second + 32 * pair);
        to->codes[r][2 * pair] = bits_at<0, 4>(both), to->codes[r][2 * pair + 1] = bits_at<4, 4>(both);
      }
    }
    take_six_bits(rows, second, to);
  }
};

template <>
struct Steps<Q5_K> {
  static constexpr int kOffset = 0, kMost = 31;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<false>* to) {
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r) {
      const __m256i high = bits_at(load32(rows[r] + 16), 4 * second, 4);
#pragma GCC unroll 2
      for (int pair = 0; pair < 2; ++pair) {
        const __m256i both = load32(rows[r] + 48 + 64 * second + 32 * pair),
                      own = _mm256_srl_epi16(high, _mm_cvtsi32_si128(2 * pair));
        to->codes[r][2 * pair] = _mm256_or_si256(bits_at<0, 4>(both), _mm256_slli_epi16(bits_at<0, 1>(own), 4));
        to->codes[r][2 * pair + 1] = _mm256_or_si256(bits_at<4, 4>(both), _mm256_slli_epi16(bits_at<1, 1>(own), 4));
      }
    }
    take_six_bits(rows, second, to);
  }
};

// The factor at byte kAt of each row, in all of its lanes.
template <int kAt>
inline void take_factors(Rows rows, __m256* to) {
#pragma GCC unroll 2
  for (int pair = 0; pair < 2; ++pair) {
    const int both = read<uint16_t>(rows[2 * pair] + kAt) | read<uint16_t>(rows[2 * pair + 1] + kAt) << 16;
    to[pair] = _mm256_cvtph_ps(
        _mm_shuffle_epi8(_mm_cvtsi32_si128(both), _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3)));
  }
}

// Eight bytes, a factor of each half of each group.
inline __m256i spread_factors(__m128i both) {
  return _mm256_cvtepi8_epi32(_mm_shuffle_epi8(both, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7)));
}

// 32 bytes whose bits 2 g and 2 g + 1 are group g's.
inline void split_pairs_of_bits(const uint8_t* p, __m256i* codes) {
  const __m256i all = load32(p);
  codes[0] = bits_at<0, 2>(all), codes[1] = bits_at<2, 2>(all);
  codes[2] = bits_at<4, 2>(all), codes[3] = bits_at<6, 2>(all);
}

template <>
struct Steps<Q6_K> {
  static constexpr int kOffset = 32, kMost = 63;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r) {
      const __m256i low[] = {load32(rows[r] + 64 * second), load32(rows[r] + 64 * second + 32)};
      const __m256i nibbles[] = {bits_at<0, 4>(low[0]), bits_at<0, 4>(low[1]), bits_at<4, 4>(low[0]),
                                 bits_at<4, 4>(low[1])};
      __m256i high[kStepGroups];
      split_pairs_of_bits(rows[r] + 128 + 32 * second, high);
#pragma GCC unroll 4
      for (int g = 0; g < kStepGroups; ++g)
        to->codes[r][g] = _mm256_or_si256(nibbles[g], _mm256_slli_epi16(high[g], 4));
      to->factors[r] = spread_factors(_mm_cvtsi64_si128(read<int64_t>(rows[r] + 192 + 8 * second)));
    }
    take_factors<208>(rows, to->scale);
  }
};

template <>
struct Steps<Q3_K> {
  static constexpr int kOffset = 4, kMost = 7;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
    for (int r = 0; r < kStepRows; ++r) {
      split_pairs_of_bits(rows[r] + 32 + 32 * second, to->codes[r]);
      const __m256i high = bits_at(load32(rows[r]), 4 * second, 4);
      for (int g = 0; g < kStepGroups; ++g)
        to->codes[r][g] = _mm256_or_si256(to->codes[r][g], _mm256_slli_epi16(bits_at(high, g, 1), 2));
      const uint64_t low = read<uint64_t>(rows[r] + 96) >> 4 * second & 0x0f0f0f0f0f0f0f0f;
      const uint64_t upper = read<uint32_t>(rows[r] + 104) >> 4 * second;
      const uint64_t two = (upper & 0x03030303) | (upper >> 2 & 0x03030303) << 32;
      const __m128i six = _mm_cvtsi64_si128(static_cast<int64_t>(low | two << 4));
      to->factors[r] = spread_factors(_mm_sub_epi8(six, _mm_set1_epi8(32)));
    }
    take_factors<108>(rows, to->scale);
  }
};

template <>
struct Steps<Q2_K> {
  static constexpr int kOffset = 0, kMost = 3;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
    for (int r = 0; r < kStepRows; ++r) {
      split_pairs_of_bits(rows[r] + 16 + 32 * second, to->codes[r]);
      const __m128i both = _mm_cvtsi64_si128(read<int64_t>(rows[r] + 8 * second)), four = _mm_set1_epi8(15);
      to->factors[r] = spread_factors(_mm_and_si128(both, four));
      to->low[r] = spread_factors(_mm_and_si128(_mm_srli_epi16(both, 4), four));
    }
    take_factors<80>(rows, to->scale), take_factors<82>(rows, to->minimum);
    to->minimum[0] = negative(to->minimum[0]), to->minimum[1] = negative(to->minimum[1]);
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

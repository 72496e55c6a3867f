// Rows of groups in registers of 512 bits: a step is 128 columns, four groups, of kStepRows rows.
//
// Codes are made unsigned by an offset, for vpdpbusd, which multiplies four bytes and adds them to each sum of 32 bits.
// Of a step's columns, the first halves of its groups (16 columns) are in one register, the second ones in another; of
// both, four bytes of each group by turns. So sum i of a register belongs to group i % 4. What all rows have together is
// in lanes 4 * row + group.
#pragma once

#include "cpu/quantized/wide.h"

#if QUIRE_WIDE == 64

#include "cpu/common/scratch.h"
#include "cpu/quantized/groups.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kStepRows = 4, kStep = 128, kStepGroups = kStep / kGroup;
// Where a token's codes lie for a step: a group's first four, from four to the next four, from a half to the other.
constexpr int kGroupAt = 4, kFourApart = 16, kHalfApart = 64;

// Rows: the addresses of the blocks that have a step's columns.
using Rows = const uint8_t* const (&)[kStepRows];

template <bool kHalves>
struct alignas(64) Step {
  __m512i codes[kStepRows][2];
  __m512 scale, minimum;
};
template <>
struct alignas(64) Step<true> {
  __m512i codes[kStepRows][2];
  __m512 scale, minimum;
  __m512i factors[kStepRows][2];  // of sums, in each row's own lanes
  __m512i low[2];                 // of all rows
};

// By quads of 16 bytes: the same four bytes of four quads next to each other.
inline __m512i by_turns(__m512i quads) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), quads);
}

// 16 bytes of each of four blocks, kBytes apart.
template <int kBytes>
inline __m512i quads(const uint8_t* p) {
  __m512i all = _mm512_castsi128_si512(load16(p));
  all = _mm512_mask_broadcast_i32x4(all, 0x00f0, load16(p + kBytes));
  all = _mm512_mask_broadcast_i32x4(all, 0x0f00, load16(p + 2 * kBytes));
  return _mm512_mask_broadcast_i32x4(all, 0xf000, load16(p + 3 * kBytes));
}

inline void split_nibbles(__m512i both, __m512i* codes) {
  codes[0] = _mm512_and_si512(both, bytes(15));
  codes[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), bytes(15));
}

// The half-precision number at byte kAt of each of four blocks of kBytes, of all rows.
template <int kBytes, int kAt>
inline __m512 halves_at(Rows rows) {
  constexpr int kSecond = 4 * kBytes - 64 < 64 ? 4 * kBytes - 64 : 64;  // where a second load begins
  constexpr auto word = [](int block) {
    const int at = block * kBytes + kAt;
    return static_cast<short>(at + 2 <= 64 ? at / 2 : 32 + (at - kSecond) / 2);
  };
  const __m512i places =
      _mm512_castsi256_si512(_mm256_setr_epi16(word(0), word(1), word(2), word(3), word(0), word(1), word(2), word(3),
                                               word(0), word(1), word(2), word(3), word(0), word(1), word(2), word(3)));
  __m512i all = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int r = 0; r < kStepRows; ++r) {
    const __mmask32 own = 0xfu << 4 * r;
    const __m512i first = _mm512_loadu_si512(rows[r]);
    if constexpr (3 * kBytes + kAt + 2 <= 64)
      all = _mm512_mask_permutexvar_epi16(all, own, places, first);
    else
      all = _mm512_or_si512(all,
                            _mm512_maskz_permutex2var_epi16(own, first, places, _mm512_loadu_si512(rows[r] + kSecond)));
  }
  return _mm512_cvtph_ps(_mm512_castsi512_si256(all));
}

// The fifth bits of four blocks, kBytes apart, as masks of the first halves' and of the second halves' bytes by turns.
template <int kBytes>
inline void add_fifth_bits(const uint8_t* p, __m512i* codes) {
  const __m128i bits =
      _mm_setr_epi32(read<int>(p), read<int>(p + kBytes), read<int>(p + 2 * kBytes), read<int>(p + 3 * kBytes));
  // A byte for each four columns of a group, by turns: byte b of the four words, then nibbles.
  const __m512i wide = _mm512_broadcast_i32x4(bits);
  for (int half = 0; half < 2; ++half) {
    // Byte i of a register is column 16 * half + 4 * (i / 16) + i % 4 of group i / 4 % 4.
    const __m512i place =
        _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)),
                        _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0x01010101, 0x01010101, 0x01010101, 0x01010101,
                                          0x01010101, 0x01010101, 0x01010101, 0x01010101));
    const __m512i own = _mm512_shuffle_epi8(wide, _mm512_add_epi8(place, bytes(2 * half)));
    const __m512i bit =
        _mm512_setr_epi32(0x08040201, 0x08040201, 0x08040201, 0x08040201, static_cast<int>(0x80402010),
                          static_cast<int>(0x80402010), static_cast<int>(0x80402010), static_cast<int>(0x80402010),
                          0x08040201, 0x08040201, 0x08040201, 0x08040201, static_cast<int>(0x80402010),
                          static_cast<int>(0x80402010), static_cast<int>(0x80402010), static_cast<int>(0x80402010));
    codes[half] = _mm512_mask_add_epi8(codes[half], _mm512_test_epi8_mask(own, bit), codes[half], bytes(16));
  }
}

// Quads kOne, kTwo, kThree, kFour of 64 bytes, by turns.
template <int kOne, int kTwo, int kThree, int kFour>
inline __m512i turned_quads(__m512i v) {
  return _mm512_permutexvar_epi32(
      _mm512_setr_epi32(4 * kOne, 4 * kTwo, 4 * kThree, 4 * kFour, 4 * kOne + 1, 4 * kTwo + 1, 4 * kThree + 1,
                        4 * kFour + 1, 4 * kOne + 2, 4 * kTwo + 2, 4 * kThree + 2, 4 * kFour + 2, 4 * kOne + 3,
                        4 * kTwo + 3, 4 * kThree + 3, 4 * kFour + 3),
      v);
}

// Each group's bytes of a register shifted right by its own number of bits; bits of the neighbour come in above.
template <int kOne, int kTwo, int kThree, int kFour>
inline __m512i shifted(__m512i v) {
  return _mm512_srlv_epi32(v, _mm512_broadcast_i32x4(_mm_setr_epi32(kOne, kTwo, kThree, kFour)));
}

// 32 bytes whose bits 2 g and 2 g + 1 are group g's.
inline void split_pairs_of_bits(const uint8_t* p, __m512i* codes) {
  for (int half = 0; half < 2; ++half) {
    const __m512i quad = _mm512_castsi128_si512(load16(p + 16 * half));
    codes[half] = _mm512_and_si512(shifted<0, 2, 4, 6>(turned_quads<0, 0, 0, 0>(quad)), bytes(3));
  }
}

// `take` is inlined everywhere: a step stays in registers, which a call would store for its caller to load.
template <class Kind>
struct Steps;

template <>
struct Steps<Q4_0> {
  static constexpr int kOffset = 8;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    for (int r = 0; r < kStepRows; ++r) split_nibbles(by_turns(quads<18>(rows[r] + 2)), to->codes[r]);
    to->scale = halves_at<18, 0>(rows);
  }
};

template <>
struct Steps<Q4_1> {
  static constexpr int kOffset = 0;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    for (int r = 0; r < kStepRows; ++r) split_nibbles(by_turns(quads<20>(rows[r] + 4)), to->codes[r]);
    to->scale = halves_at<20, 0>(rows), to->minimum = halves_at<20, 2>(rows);
  }
};

template <>
struct Steps<Q5_0> {
  static constexpr int kOffset = 16;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    for (int r = 0; r < kStepRows; ++r) {
      split_nibbles(by_turns(quads<22>(rows[r] + 6)), to->codes[r]);
      add_fifth_bits<22>(rows[r] + 2, to->codes[r]);
    }
    to->scale = halves_at<22, 0>(rows);
  }
};

template <>
struct Steps<Q5_1> {
  static constexpr int kOffset = 0;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    for (int r = 0; r < kStepRows; ++r) {
      split_nibbles(by_turns(quads<24>(rows[r] + 8)), to->codes[r]);
      add_fifth_bits<24>(rows[r] + 4, to->codes[r]);
    }
    to->scale = halves_at<24, 0>(rows), to->minimum = halves_at<24, 2>(rows);
  }
};

// 32 bytes of each of two blocks.
inline __m512i two_blocks(const uint8_t* one, const uint8_t* other) {
  const auto at = [](const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
  return _mm512_inserti64x4(_mm512_castsi256_si512(at(one)), at(other), 1);
}

template <>
struct Steps<Q8_0> {
  static constexpr int kOffset = 128;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    const __m512i first = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(4));
    for (int r = 0; r < kStepRows; ++r) {
      const __m512i a = two_blocks(rows[r] + 2, rows[r] + 36), b = two_blocks(rows[r] + 70, rows[r] + 104);
      to->codes[r][0] = _mm512_xor_si512(_mm512_permutex2var_epi32(a, first, b), bytes(128));
      to->codes[r][1] = _mm512_xor_si512(_mm512_permutex2var_epi32(a, second, b), bytes(128));
    }
    to->scale = halves_at<34, 0>(rows);
  }
};

template <>
struct Steps<MxFp4> {
  static constexpr int kOffset = 12;
  static inline __attribute__((always_inline)) void take(Rows rows, int, Step<false>* to) {
    const __m512i values =
        _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    alignas(16) uint8_t exponents[4 * kStepRows];
    for (int r = 0; r < kStepRows; ++r) {
      split_nibbles(by_turns(quads<17>(rows[r] + 1)), to->codes[r]);
      for (int half = 0; half < 2; ++half) to->codes[r][half] = _mm512_shuffle_epi8(values, to->codes[r][half]);
      for (int g = 0; g < kStepGroups; ++g) exponents[4 * r + g] = rows[r][17 * g];
    }
    const __m512i e = _mm512_cvtepu8_epi32(load16(exponents)), one = _mm512_set1_epi32(1);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23);
    to->scale = _mm512_castsi512_ps(
        _mm512_mask_sllv_epi32(normal, _mm512_cmple_epi32_mask(e, one), _mm512_set1_epi32(0x00200000), e));
  }
};

// Scales and minimums of 6 bits, for the one or the other half of a block.
template <bool kSecond>
inline __attribute__((always_inline)) void take_six_bits(Rows rows, Step<false>* to) {
  const __m128i a = load16(rows[0]), b = load16(rows[1]), c = load16(rows[2]), d = load16(rows[3]);
  const __m128i ab = _mm_unpacklo_epi32(a, b), cd = _mm_unpacklo_epi32(c, d);
  const __m128i ab_high = _mm_unpackhi_epi32(a, b), cd_high = _mm_unpackhi_epi32(c, d);
  const __m128i first = _mm_unpackhi_epi64(ab, cd), second = _mm_unpacklo_epi64(ab_high, cd_high);
  const __m128i six = _mm_set1_epi8(63), four = _mm_set1_epi8(15), upper = _mm_set1_epi8(48);
  __m128i scales = _mm_and_si128(first, six), minimums = _mm_and_si128(second, six);
  if constexpr (kSecond) {
    const __m128i third = _mm_unpackhi_epi64(ab_high, cd_high);
    scales = _mm_or_si128(_mm_and_si128(third, four), _mm_and_si128(_mm_srli_epi32(first, 2), upper));
    minimums =
        _mm_or_si128(_mm_and_si128(_mm_srli_epi32(third, 4), four), _mm_and_si128(_mm_srli_epi32(second, 2), upper));
  }
  // Of each row the factor of its scales, and that of its minimums.
  const __m512 both = _mm512_castps256_ps512(_mm256_cvtph_ps(_mm_unpacklo_epi64(ab, cd)));
  const __m512i places = _mm512_setr_epi32(0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6);
  const __m512 scale = _mm512_permutexvar_ps(places, both);
  const __m512 minimum = _mm512_permutexvar_ps(_mm512_add_epi32(places, _mm512_set1_epi32(1)), both);
  to->scale = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(scales)));
  to->minimum =
      _mm512_xor_ps(_mm512_mul_ps(minimum, _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(minimums))), _mm512_set1_ps(-0.0f));
}

inline void split_nibbles_by_turns(const uint8_t* p, __m512i* codes) {
  const __m512i all = _mm512_loadu_si512(p);
  codes[0] = _mm512_and_si512(shifted<0, 4, 0, 4>(turned_quads<0, 0, 2, 2>(all)), bytes(15));
  codes[1] = _mm512_and_si512(shifted<0, 4, 0, 4>(turned_quads<1, 1, 3, 3>(all)), bytes(15));
}

template <>
struct Steps<Q4_K> {
  static constexpr int kOffset = 0;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<false>* to) {
    for (int r = 0; r < kStepRows; ++r) split_nibbles_by_turns(rows[r] + 16 + 64 * second, to->codes[r]);
    second ? take_six_bits<true>(rows, to) : take_six_bits<false>(rows, to);
  }
};

template <>
struct Steps<Q5_K> {
  static constexpr int kOffset = 0;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<false>* to) {
    const __m512i bit =
        _mm512_broadcast_i32x4(second ? _mm_setr_epi32(0x10101010, 0x20202020, 0x40404040, static_cast<int>(0x80808080))
                                      : _mm_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808));
    for (int r = 0; r < kStepRows; ++r) {
      split_nibbles_by_turns(rows[r] + 48 + 64 * second, to->codes[r]);
      for (int half = 0; half < 2; ++half) {
        const __m512i high = turned_quads<0, 0, 0, 0>(_mm512_castsi128_si512(load16(rows[r] + 16 + 16 * half)));
        __m512i& codes = to->codes[r][half];
        codes = _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(high, bit), codes, bytes(16));
      }
    }
    second ? take_six_bits<true>(rows, to) : take_six_bits<false>(rows, to);
  }
};

// The factor at byte kAt of each row, in all of its lanes.
template <int kAt>
inline __m512 factor_of_rows(Rows rows) {
  __m128i all = _mm_cvtsi32_si128(read<uint16_t>(rows[0] + kAt));
  all = _mm_insert_epi16(all, read<uint16_t>(rows[1] + kAt), 1);
  all = _mm_insert_epi16(all, read<uint16_t>(rows[2] + kAt), 2);
  all = _mm_insert_epi16(all, read<uint16_t>(rows[3] + kAt), 3);
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                               _mm512_castps128_ps512(_mm_cvtph_ps(all)));
}

// Eight bytes, a factor of each half of each group: those of the first halves, and of the second, for all lanes.
inline void spread_factors(__m128i both, __m512i* factors) {
  factors[0] =
      _mm512_cvtepi8_epi32(_mm_shuffle_epi8(both, _mm_setr_epi8(0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6)));
  factors[1] =
      _mm512_cvtepi8_epi32(_mm_shuffle_epi8(both, _mm_setr_epi8(1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 5, 7, 1, 3, 5, 7)));
}

template <>
struct Steps<Q6_K> {
  static constexpr int kOffset = 32;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
    for (int r = 0; r < kStepRows; ++r) {
      const __m512i low = _mm512_loadu_si512(rows[r] + 64 * second);
      __m512i high[2];
      split_pairs_of_bits(rows[r] + 128 + 32 * second, high);
      to->codes[r][0] = _mm512_and_si512(shifted<0, 0, 4, 4>(turned_quads<0, 2, 0, 2>(low)), bytes(15));
      to->codes[r][1] = _mm512_and_si512(shifted<0, 0, 4, 4>(turned_quads<1, 3, 1, 3>(low)), bytes(15));
      for (int half = 0; half < 2; ++half)
        to->codes[r][half] = _mm512_or_si512(to->codes[r][half], _mm512_slli_epi16(high[half], 4));
      spread_factors(_mm_cvtsi64_si128(read<int64_t>(rows[r] + 192 + 8 * second)), to->factors[r]);
    }
    to->scale = factor_of_rows<208>(rows);
  }
};

template <>
struct Steps<Q3_K> {
  static constexpr int kOffset = 4;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
    const __m512i bit =
        _mm512_broadcast_i32x4(second ? _mm_setr_epi32(0x10101010, 0x20202020, 0x40404040, static_cast<int>(0x80808080))
                                      : _mm_setr_epi32(0x01010101, 0x02020202, 0x04040404, 0x08080808));
    for (int r = 0; r < kStepRows; ++r) {
      split_pairs_of_bits(rows[r] + 32 + 32 * second, to->codes[r]);
      for (int half = 0; half < 2; ++half) {
        const __m512i high = turned_quads<0, 0, 0, 0>(_mm512_castsi128_si512(load16(rows[r] + 16 * half)));
        __m512i& codes = to->codes[r][half];
        codes = _mm512_mask_add_epi8(codes, _mm512_test_epi8_mask(high, bit), codes, bytes(4));
      }
      const uint64_t low = read<uint64_t>(rows[r] + 96) >> 4 * second & 0x0f0f0f0f0f0f0f0f;
      const uint64_t high = read<uint32_t>(rows[r] + 104) >> 4 * second;
      const uint64_t two = (high & 0x03030303) | (high >> 2 & 0x03030303) << 32;
      const __m128i six = _mm_cvtsi64_si128(static_cast<int64_t>(low | two << 4));
      spread_factors(_mm_sub_epi8(six, _mm_set1_epi8(32)), to->factors[r]);
    }
    to->scale = factor_of_rows<108>(rows);
  }
};

template <>
struct Steps<Q2_K> {
  static constexpr int kOffset = 0;
  static inline __attribute__((always_inline)) void take(Rows rows, int second, Step<true>* to) {
    alignas(64) int low[2][4 * kStepRows];
    for (int r = 0; r < kStepRows; ++r) {
      split_pairs_of_bits(rows[r] + 16 + 32 * second, to->codes[r]);
      const __m128i both = _mm_cvtsi64_si128(read<int64_t>(rows[r] + 8 * second)), four = _mm_set1_epi8(15);
      spread_factors(_mm_and_si128(both, four), to->factors[r]);
      __m512i own[2];
      spread_factors(_mm_and_si128(_mm_srli_epi16(both, 4), four), own);
      for (int half = 0; half < 2; ++half)
        _mm_store_si128(reinterpret_cast<__m128i*>(low[half] + 4 * r), _mm512_castsi512_si128(own[half]));
    }
    to->low[0] = _mm512_load_si512(low[0]), to->low[1] = _mm512_load_si512(low[1]);
    to->scale = factor_of_rows<80>(rows);
    to->minimum = _mm512_xor_ps(factor_of_rows<82>(rows), _mm512_set1_ps(-0.0f));
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

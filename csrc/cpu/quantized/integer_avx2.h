// The products of integer_products.h by registers of 256 bits, with the very sums: a step of kStepRows rows, and rows of
// int8.
#pragma once

#include "cpu/quantized/step_tokens.h"

#if QUIRE_WIDE == 32

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kStepTokens = 4, kRowTokens = 2;

// Lanes 4 * row + chain, of two rows each.
struct Chains {
  __m256 first, second;
};

inline __m256i broadcast4(const int* p) { return _mm256_broadcastsi128_si256(load16(p)); }
inline __m256 broadcast4(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }

inline Vec vec_of(__m128 four) {
#if defined(__AVX512F__)
  return {_mm512_castps128_ps512(four)};
#else
  return {_mm256_castps128_ps256(four), _mm256_setzero_ps()};
#endif
}

// Of each row's chains (0 + 1) + (2 + 3), in the first four lanes.
inline Vec add_chains(const Chains& a) {
  const __m256 twos = _mm256_hadd_ps(a.first, a.second), all = _mm256_hadd_ps(twos, twos);
  return vec_of(_mm_unpacklo_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

// In each lane of 128 bits, the sums of the four registers.
inline __m256i add_up(__m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
}

// A row's dot products with a token in a step: the first halves' of all groups, then the second ones'.
template <int kMost>
inline __attribute__((always_inline)) __m256i multiply_groups(const __m256i* w, const int8_t* codes) {
  const __m256i* x = reinterpret_cast<const __m256i*>(codes);
#if defined(QUIRE_HAS_DPBUSD)
  const __m256i zero = _mm256_setzero_si256();
  return add_up(add_products(zero, w[0], x[0]), add_products(zero, w[1], x[1]), add_products(zero, w[2], x[2]),
                add_products(zero, w[3], x[3]));
#else
  constexpr bool kSigned = kMost < 0;
  constexpr int kFit = 32767 / (2 * 127 * (kSigned ? -kMost : kMost));  // sums of pairs, in 16 bits
  const __m256i a = pairs_of_products<kSigned>(w[0], x[0]), b = pairs_of_products<kSigned>(w[1], x[1]);
  const __m256i c = pairs_of_products<kSigned>(w[2], x[2]), d = pairs_of_products<kSigned>(w[3], x[3]);
  if constexpr (kFit >= 4)
    return sums_of_pairs(_mm256_hadd_epi16(_mm256_hadd_epi16(a, b), _mm256_hadd_epi16(c, d)));
  else if constexpr (kFit >= 2)
    return _mm256_hadd_epi32(sums_of_pairs(_mm256_hadd_epi16(a, b)), sums_of_pairs(_mm256_hadd_epi16(c, d)));
  else
    return add_up(sums_of_pairs(a), sums_of_pairs(b), sums_of_pairs(c), sums_of_pairs(d));
#endif
}

// The sums of both halves, of two rows.
inline __m256i add_halves(__m256i one, __m256i other) {
  return _mm256_add_epi32(_mm256_permute2x128_si256(one, other, 0x20), _mm256_permute2x128_si256(one, other, 0x31));
}

template <int kOffset>
inline __m256i times_offset(__m256i sums) {
  static_assert(kOffset == 12 || (kOffset & (kOffset - 1)) == 0, "others need a multiplication");
  if constexpr (kOffset == 12) return _mm256_add_epi32(_mm256_slli_epi32(sums, 3), _mm256_slli_epi32(sums, 2));
  return _mm256_slli_epi32(sums, __builtin_ctz(kOffset | 1 << 30));
}

inline __m256 add_scaled(__m256i sums, __m256 scale, __m256 acc) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), scale, acc);
}

// A token's share of a step, by one of its codes.
template <class Kind>
inline __attribute__((always_inline)) Chains add_codes(const Chains& acc, const Step<Kind::kHalves>& step,
                                                       const StepCodes& x) {
  constexpr int kOffset = Steps<Kind>::kOffset;
  const __m256 scale = broadcast4(x.scales);
  const __m256 scales[] = {_mm256_mul_ps(step.scale[0], scale), _mm256_mul_ps(step.scale[1], scale)};
  __m256 chains[] = {acc.first, acc.second};
  __m256i sums[kStepRows];
#pragma GCC unroll 4
  for (int r = 0; r < kStepRows; ++r) sums[r] = multiply_groups<Steps<Kind>::kMost>(step.codes[r], x.codes[0]);
  if constexpr (Kind::kHalves) {
    const __m256i of_first = broadcast4(x.first_sums);
    const __m256i halves = _mm256_blend_epi32(of_first, _mm256_sub_epi32(broadcast4(x.sums), of_first), 0xf0);
    const __m256i off = times_offset<kOffset>(halves);
#pragma GCC unroll 4
    for (int r = 0; r < kStepRows; ++r)
      sums[r] = _mm256_mullo_epi32(kOffset ? _mm256_sub_epi32(sums[r], off) : sums[r], step.factors[r]);
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      chains[pair] = add_scaled(add_halves(sums[2 * pair], sums[2 * pair + 1]), scales[pair], chains[pair]);
      if constexpr (Kind::kMinimum) {
        const __m256i low = add_halves(_mm256_mullo_epi32(halves, step.low[2 * pair]),
                                       _mm256_mullo_epi32(halves, step.low[2 * pair + 1]));
        chains[pair] = add_scaled(low, _mm256_mul_ps(step.minimum[pair], scale), chains[pair]);
      }
    }
  } else {
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      __m256i total = add_halves(sums[2 * pair], sums[2 * pair + 1]);
      if constexpr (kOffset > 0) total = _mm256_sub_epi32(total, times_offset<kOffset>(broadcast4(x.sums)));
      chains[pair] = add_scaled(total, scales[pair], chains[pair]);
      if constexpr (Kind::kMinimum)
        chains[pair] = _mm256_fmadd_ps(step.minimum[pair], broadcast4(x.scaled_sums), chains[pair]);
    }
  }
  return {chains[0], chains[1]};
}

// A step as so many tokens take it.
template <class Kind, int kCount>
inline const Step<Kind::kHalves>& for_tokens(const Step<Kind::kHalves>& step) {
  return step;
}

// The second codes' share of the groups that have them, a bit for each.
template <class Kind>
inline __attribute__((always_inline)) Chains add_rest(const Chains& acc, const Step<Kind::kHalves>& step,
                                                      const StepCodes& rest, int groups) {
  const Chains all = add_codes<Kind>(acc, step, rest);
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 1, 2, 4, 8);
  const __m256 there = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(all_lanes(groups), bit), bit));
  return {_mm256_blendv_ps(acc.first, all.first, there), _mm256_blendv_ps(acc.second, all.second, there)};
}

// Bytes of a row of int8; past the first `left`, zeros.
inline __m256i row_bytes_at(const uint8_t* p, int64_t left) {
  uint8_t some[32] = {};
  if (left < 32) __builtin_memcpy(some, p, left);
  const __m256i codes = load32(left < 32 ? some : p);
  return kSignedBytes ? codes : _mm256_xor_si256(codes, bytes(128));
}
constexpr int kRowOffset = kSignedBytes ? 0 : 128;

inline __m256i add_row(__m256i sum, __m256i w, const int8_t* codes) {
  const __m256i x = _mm256_load_si256(reinterpret_cast<const __m256i*>(codes));
#if defined(QUIRE_HAS_DPBUSD)
  return add_products(sum, w, x);
#else
  return _mm256_add_epi32(sum, sums_of_pairs(pairs_of_products<true>(w, x)));
#endif
}

inline __m128i totals_of_rows(const __m256i* sums) {
  const __m256i lanes = add_up(sums[0], sums[1], sums[2], sums[3]);
  return _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

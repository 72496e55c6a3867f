// A call's rows of x as int8, in the order of steps_avx512.h or steps_avx2.h, with the very codes and scales of tokens.h.
#pragma once

#include "cpu/quantized/steps_avx2.h"
#include "cpu/quantized/steps_avx512.h"
#include "cpu/quantized/tokens.h"

#if defined(QUIRE_WIDE)

namespace quire {
namespace QUIRE_ISA {
namespace {

// The largest size, and 16 codes. Sizes as whole numbers, in whose order NaN is above all.
#if defined(__AVX512F__)
inline __m512i sizes_of(Vec a) { return _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)); }
inline __m512i larger(__m512i a, __m512i b) { return _mm512_max_epu32(a, b); }
inline float largest_of(__m512i sizes) { return as_float(_mm512_reduce_max_epu32(sizes)); }
inline __m128i codes_of(Vec steps) { return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(round(steps).v)); }
#else
inline __m256i sizes_of(Vec a) {
  const __m256i all = _mm256_set1_epi32(0x7fffffff);
  return _mm256_max_epi32(_mm256_and_si256(_mm256_castps_si256(a.lo), all),
                          _mm256_and_si256(_mm256_castps_si256(a.hi), all));
}
inline __m256i larger(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }
inline float largest_of(__m256i sizes) {
  __m128i most = _mm_max_epi32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1));
  return as_float(static_cast<uint32_t>(_mm_cvtsi128_si32(most)));
}
inline __m128i codes_of(Vec steps) {
  alignas(16) int8_t codes[kLanes];
  store(codes, round(steps));
  return load16(codes);
}
#endif

// The sums of each four codes.
inline __m128i sums_of_fours(__m128i codes) {
  return _mm_madd_epi16(_mm_maddubs_epi16(_mm_set1_epi8(1), codes), _mm_set1_epi16(1));
}

// A group's 32 codes, and what they are scaled by.
struct GroupCodes {
  __m128i parts[2];
  float scale;
  int sum, first_sum;  // of all codes, and of the first half's

  GroupCodes(Vec first, Vec second, float by) : parts{codes_of(first), codes_of(second)}, scale(by) {
    const __m128i fours = _mm_hadd_epi32(sums_of_fours(parts[0]), sums_of_fours(parts[1]));
    const int64_t sums = _mm_cvtsi128_si64(_mm_hadd_epi32(fours, fours));
    first_sum = static_cast<int>(sums), sum = first_sum + static_cast<int>(sums >> 32);
  }

  // Four codes at each of eight places, `apart` bytes from one to the next; second: from the first half to the other.
  void store(int8_t* to, int64_t apart, int64_t second) const {
    for (int half = 0; half < 2; ++half) {
      alignas(16) int fours[4];
      _mm_store_si128(reinterpret_cast<__m128i*>(fours), parts[half]);
      for (int i = 0; i < 4; ++i) __builtin_memcpy(to + second * half + apart * i, fours + i, 4);
    }
  }
};

// A group of a row in steps of its scale.
struct GroupSteps {
  Vec first, second;
  float scale;
  bool outliers;

  // x: null, all zeros.
  template <class T>
  GroupSteps(const T* x, float outlier) : first(x ? load(x) : zero()), second(x ? load(x + 16) : zero()) {
    const float size = largest_of(larger(sizes_of(first), sizes_of(second)));
    const TokenScale by(size);
    first = in_steps(first, by.inverse), second = in_steps(second, by.inverse);
    scale = by.scale, outliers = size * size > outlier;
  }

  GroupCodes own() const { return {first, second, scale}; }
  GroupCodes rest() const { return {rest_in_steps(first), rest_in_steps(second), scale * kRestScale}; }
};

// Four groups of a token: their codes, in the order of steps_avx512.h or steps_avx2.h, and what groups have.
struct alignas(64) StepCodes {
  int8_t codes[2][64];
  int sums[kStepGroups], first_sums[kStepGroups];       // of a group's codes, and of its first half's
  float scales[kStepGroups], scaled_sums[kStepGroups];  // scale, and scale * sum of codes

  void put(int group, const GroupCodes& from) {
    from.store(codes[0] + kGroupAt * group, kFourApart, kHalfApart);
    sums[group] = from.sum, first_sums[group] = from.first_sum;
    scales[group] = from.scale, scaled_sums[group] = from.scale * static_cast<float>(from.sum);
  }
};
struct StepToken {
  StepCodes own;
  int groups_with_rest;  // a bit for each that has second codes
};

// By groups: [steps][tokens], as products go through them. rests: the second codes, of the groups that have them; of
// others, whatever there was. They lie apart, since few groups have any: what all products read fits in the first-level
// cache then.
class GroupTokens {
 public:
  explicit GroupTokens(const LinearArgs& args)
      : args_(args), steps_((args.features + kStep - 1) / kStep),
        owns_(scratch<StepToken, GroupTokens>(args.tokens * steps_)),
        rests_(scratch<StepCodes, GroupTokens>(args.tokens * steps_)) {}

  int64_t steps() const { return steps_; }
  // Of all tokens at a step.
  const StepToken* owns(int64_t step) const { return owns_ + step * args_.tokens; }
  const StepCodes* rests(int64_t step) const { return rests_ + step * args_.tokens; }

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    const float outlier = outlier_square(x, args_.features);
    for (int64_t s = 0; s < steps_; ++s) {
      const int64_t place = s * args_.tokens + token;
      StepToken& to = owns_[place];
      to.groups_with_rest = 0;
      for (int g = 0; g < kStepGroups; ++g) {
        const int64_t k = s * kStep + g * kGroup;
        const GroupSteps group(k < args_.features ? x + k : nullptr, outlier);
        to.own.put(g, group.own());
        if (!group.outliers) continue;
        to.groups_with_rest |= 1 << g;
        rests_[place].put(g, group.rest());
      }
    }
  }

 private:
  const LinearArgs& args_;
  const int64_t steps_;
  StepToken* const owns_;
  StepCodes* const rests_;
};

// By whole rows: [features, to the next 64] codes, one scale, the sum of all codes.
class RowTokens {
 public:
  struct Token {
    const int8_t* codes;
    float scale;
    int sum;
  };

  explicit RowTokens(const LinearArgs& args)
      : args_(args), width_((args.features + 63) / 64 * 64),
        memory_(scratch<int8_t, RowTokens>(args.tokens * stride())) {}

  Token operator[](int64_t token) const {
    const int8_t* own = memory_ + token * stride();
    return {own, read<float>(own + width_), read<int>(own + width_ + 4)};
  }

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    int8_t* codes = memory_ + token * stride();
    auto sizes = sizes_of(zero());
    for (int64_t k = 0; k < args_.features; k += kLanes) sizes = larger(sizes, sizes_of(at(x, k)));
    const TokenScale own(largest_of(sizes));
    __m128i fours = _mm_setzero_si128();
    for (int64_t k = 0; k < width_; k += kLanes) {
      const __m128i part = codes_of(in_steps(k < args_.features ? at(x, k) : zero(), own.inverse));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), part);
      fours = _mm_add_epi32(fours, sums_of_fours(part));
    }
    fours = _mm_hadd_epi32(fours, fours);
    const int sum = _mm_cvtsi128_si32(_mm_hadd_epi32(fours, fours));
    __builtin_memcpy(codes + width_, &own.scale, 4);
    __builtin_memcpy(codes + width_ + 4, &sum, 4);
  }

 private:
  int64_t stride() const { return width_ + 64; }
  template <class T>
  Vec at(const T* x, int64_t k) const {
    const int64_t left = args_.features - k;
    return left >= kLanes ? load(x + k) : load_first(x + k, static_cast<int>(left));
  }

  const LinearArgs& args_;
  const int64_t width_;
  int8_t* const memory_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

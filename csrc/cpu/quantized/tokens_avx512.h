// A call's rows of x as int8, in the order of steps_avx512.h, with the very codes and scales of tokens.h.
#pragma once

#if defined(__AVX512VNNI__)

#include "cpu/quantized/steps_avx512.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// What a group of 32 columns, or a whole row, is scaled by. sizes: as whole numbers, in whose order NaN is above all.
struct TokenScale {
  float scale, inverse;
  explicit TokenScale(__m512i sizes) {
    const float size = as_float(_mm512_reduce_max_epu32(sizes));
    scale = size / 127.0f, inverse = size > 0x1p-100f ? 127.0f / size : 0.0f;
  }
};

inline __m512i sizes_of(Vec a) { return _mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)); }

// 16 codes.
inline __m128i codes_of(Vec a, float inverse) {
  const Vec held = min(set1(127.0f), max(mul(a, set1(inverse)), set1(-127.0f)));
  return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(round(held).v));
}

inline int sum_of(__m128i codes) { return _mm512_reduce_add_epi32(_mm512_cvtepi8_epi32(codes)); }

// A group's 32 codes, and what it is scaled by. x: null, all zeros.
struct GroupCodes {
  __m128i parts[2];
  float scale;
  int sum, first_sum;  // of all codes, and of the first half's

  template <class T>
  explicit GroupCodes(const T* x) {
    const Vec first = x ? load(x) : zero(), second = x ? load(x + 16) : zero();
    const TokenScale own(_mm512_max_epu32(sizes_of(first), sizes_of(second)));
    parts[0] = codes_of(first, own.inverse), parts[1] = codes_of(second, own.inverse);
    const __m128i zero4 = _mm_setzero_si128(), ones = _mm_set1_epi8(1);
    const __m128i fours =
        _mm_hadd_epi32(_mm_dpbusd_epi32(zero4, ones, parts[0]), _mm_dpbusd_epi32(zero4, ones, parts[1]));
    const int64_t sums = _mm_cvtsi128_si64(_mm_hadd_epi32(fours, fours));
    scale = own.scale, first_sum = static_cast<int>(sums), sum = first_sum + static_cast<int>(sums >> 32);
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

// By groups: of each token [steps][2][64] codes, then what groups have, [steps][4] each.
class GroupTokens {
 public:
  struct Token {
    const int8_t* codes;
    const float *scales, *scaled_sums;  // scale, and scale * sum of codes
    const int *sums, *first_sums;       // of a group's codes, and of its first half's
  };

  explicit GroupTokens(const LinearArgs& args)
      : args_(args), steps_((args.features + kStep - 1) / kStep),
        memory_(scratch<int8_t, GroupTokens>(args.tokens * token_bytes())) {}

  int64_t steps() const { return steps_; }

  Token operator[](int64_t token) const {
    const int8_t* own = memory_ + token * token_bytes();
    const float* scales = reinterpret_cast<const float*>(own + steps_ * kStep);
    const int64_t groups = steps_ * kStepGroups;
    const int* sums = reinterpret_cast<const int*>(scales + 2 * groups);
    return {own, scales, scales + groups, sums, sums + groups};
  }

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    int8_t* codes = memory_ + token * token_bytes();
    float* scales = reinterpret_cast<float*>(codes + steps_ * kStep);
    const int64_t groups = steps_ * kStepGroups;
    int* sums = reinterpret_cast<int*>(scales + 2 * groups);
    for (int64_t g = 0; g < groups; ++g) {
      const GroupCodes own(g * kGroup < args_.features ? x + g * kGroup : nullptr);
      own.store(codes + g / kStepGroups * kStep + g % kStepGroups * 4, 16, 64);
      scales[g] = own.scale, scales[groups + g] = own.scale * static_cast<float>(own.sum);
      sums[g] = own.sum, sums[groups + g] = own.first_sum;
    }
  }

 private:
  int64_t token_bytes() const { return steps_ * (kStep + kStepGroups * 4 * 4); }

  const LinearArgs& args_;
  const int64_t steps_;
  int8_t* const memory_;
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
    __m512i sizes = _mm512_setzero_si512();
    for (int64_t k = 0; k < args_.features; k += kLanes) sizes = _mm512_max_epu32(sizes, sizes_of(at(x, k)));
    const TokenScale own(sizes);
    int sum = 0;
    for (int64_t k = 0; k < width_; k += kLanes) {
      const __m128i part = codes_of(k < args_.features ? at(x, k) : zero(), own.inverse);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + k), part);
      sum += sum_of(part);
    }
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

// A call's rows of x as int8: each by itself, so that what becomes of it does not depend on its company.
//
// Of a group of columns: scale = the largest size / 127, code = x / scale, rounded to the nearest, of two the even one.
// A group has outliers where its largest size is above four times the root of the mean square of the row: its other
// columns are small then, and one code is a coarse one. So it has second codes, of what the first ones leave out, in
// steps of scale / 256. Whether it has is the row's own business as well.
#pragma once

#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"
#include "cpu/quantized/groups.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// The largest size among n elements; NaN where one is NaN.
template <class T>
inline float largest(const T* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t k = 0; k < n; k += kLanes) {
    float values[kLanes];
    store(values, load_first(x + k, static_cast<int>(n - k < kLanes ? n - k : kLanes)));
    for (int i = 0; i < kLanes; ++i) {
      // As whole numbers, sizes are in the same order, and NaN above all.
      const uint32_t size = read<uint32_t>(values + i) & 0x7fffffff;
      most = size > most ? size : most;
    }
  }
  return as_float(most);
}

// The square of the size above which a row's group has outliers. Of infinities and NaN, and of sizes whose squares are
// beyond float: none is above it.
template <class T>
inline float outlier_square(const T* x, int64_t n) {
  Vec squares = zero();
  for (int64_t k = 0; k < n; k += kLanes) {
    const Vec own = load_first(x + k, static_cast<int>(n - k < kLanes ? n - k : kLanes));
    squares = fma(own, own, squares);
  }
  return 16.0f * (reduce_add(squares) / static_cast<float>(n));
}

// What elements of a largest size are scaled by. Of infinities and NaN the scale is no number, and so is all that it
// scales.
struct TokenScale {
  float scale, inverse;
  explicit TokenScale(float size) : scale(size / 127.0f), inverse(size > 0x1p-100f ? 127.0f / size : 0.0f) {}
};

inline Vec within_127(Vec a) { return min(set1(127.0f), max(a, set1(-127.0f))); }
// Elements in steps of the scale, and what their codes leave out, in steps of scale / 256.
inline Vec in_steps(Vec x, float inverse) { return within_127(mul(x, set1(inverse))); }
inline Vec rest_in_steps(Vec steps) { return within_127(mul(sub(steps, round(steps)), set1(256.0f))); }
constexpr float kRestScale = 1.0f / 256;

// The codes of n elements, and the second ones where `rest` is given.
template <class T>
inline void quantize(const T* x, int64_t n, float inverse, int8_t* codes, int8_t* rest) {
  for (int64_t k = 0; k < n; k += kLanes) {
    const int count = static_cast<int>(n - k < kLanes ? n - k : kLanes);
    const Vec steps = in_steps(load_first(x + k, count), inverse);
    float values[2][kLanes];
    store(values[0], round(steps)), store(values[1], round(rest_in_steps(steps)));
    for (int i = 0; i < count; ++i) {
      codes[k + i] = static_cast<int8_t>(values[0][i]);
      if (rest) rest[k + i] = static_cast<int8_t>(values[1][i]);
    }
  }
}

struct QuantizedGroup {
  int8_t codes[kGroup];
  int sums[2];  // of each half's codes
  float scale;
  int sum() const { return sums[0] + sums[1]; }
};

// A group of a row: its codes, and the second ones of a group that has outliers.
struct TokenGroup {
  QuantizedGroup own, rest;
  bool has_rest;

  template <class T>
  void take(const T* x, float outlier) {
    const float size = largest(x, kGroup);
    const TokenScale by(size);
    has_rest = size * size > outlier;
    quantize(x, kGroup, by.inverse, own.codes, has_rest ? rest.codes : nullptr);
    own.scale = by.scale, rest.scale = by.scale * kRestScale;
    add_up(&own);
    if (has_rest) add_up(&rest);
  }

 private:
  static void add_up(QuantizedGroup* group) {
    for (int half = 0; half < 2; ++half) {
      group->sums[half] = 0;
      for (int i = 0; i < 16; ++i) group->sums[half] += group->codes[16 * half + i];
    }
  }
};

// By groups of 32 columns.
class GroupedTokens {
 public:
  using Token = const TokenGroup*;  // [groups]

  explicit GroupedTokens(const LinearArgs& args)
      : args_(args), groups_(args.features / kGroup),
        memory_(scratch<TokenGroup, GroupedTokens>(args.tokens * groups_)) {}

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    const float outlier = outlier_square(x, args_.features);
    for (int64_t g = 0; g < groups_; ++g) memory_[token * groups_ + g].take(x + g * kGroup, outlier);
  }

  int64_t groups() const { return groups_; }
  Token operator[](int64_t token) const { return memory_ + token * groups_; }

 private:
  const LinearArgs& args_;
  const int64_t groups_;
  TokenGroup* const memory_;
};

// By one scale a row, with one code a column.
class WholeTokens {
 public:
  struct Token {
    const int8_t* codes;  // [K]
    float scale;
  };

  explicit WholeTokens(const LinearArgs& args)
      : args_(args), codes_(scratch<int8_t, WholeTokens>(args.tokens * args.features)),
        scales_(scratch<float, WholeTokens>(args.tokens)) {}

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    const TokenScale by(largest(x, args_.features));
    quantize(x, args_.features, by.inverse, codes_ + token * args_.features, nullptr);
    scales_[token] = by.scale;
  }

  Token operator[](int64_t token) const { return {codes_ + token * args_.features, scales_[token]}; }

 private:
  const LinearArgs& args_;
  int8_t* const codes_;
  float* const scales_;
};

template <bool kWholeRows>
struct TokensOf {
  using Type = GroupedTokens;
};
template <>
struct TokensOf<true> {
  using Type = WholeTokens;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

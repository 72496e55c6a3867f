// A call's rows of x as int8: each by itself, so that what becomes of it does not depend on its company.
//
// Of a group of columns: scale = the largest size / 127, code = x / scale, rounded to the nearest, of two the even one.
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

// The codes of n elements, and their scale. Of infinities and NaN the scale is no number, and so is all that it scales.
template <class T>
inline float quantize(const T* x, int64_t n, int8_t* codes) {
  const float size = largest(x, n);
  const float inverse = size > 0x1p-100f ? 127.0f / size : 0.0f;
  for (int64_t k = 0; k < n; k += kLanes) {
    const int count = static_cast<int>(n - k < kLanes ? n - k : kLanes);
    float values[kLanes];
    store(values, round(min(set1(127.0f), max(mul(load_first(x + k, count), set1(inverse)), set1(-127.0f)))));
    for (int i = 0; i < count; ++i) codes[k + i] = static_cast<int8_t>(values[i]);
  }
  return size / 127.0f;
}

struct QuantizedToken {
  const int8_t* codes;  // [K]
  const float* scales;  // of each group
  const int* sums;      // [groups, 2]: of each half's codes
};

// By groups of 32 columns; with kWholeRows, by one scale a row, and without sums.
template <bool kWholeRows>
class QuantizedTokens {
 public:
  explicit QuantizedTokens(const LinearArgs& args)
      : args_(args), groups_(kWholeRows ? 1 : args.features / kGroup),
        codes_(scratch<int8_t, QuantizedTokens>(args.tokens * args.features)),
        scales_(scratch<float, QuantizedTokens>(args.tokens * groups_)),
        sums_(scratch<int, QuantizedTokens>(kWholeRows ? 0 : args.tokens * groups_ * 2)) {}

  template <class T>
  void quantize_token(int64_t token) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    int8_t* codes = codes_ + token * args_.features;
    float* scales = scales_ + token * groups_;
    if constexpr (kWholeRows) {
      *scales = quantize(x, args_.features, codes);
    } else {
      int* sums = sums_ + token * groups_ * 2;
      for (int64_t g = 0; g < groups_; ++g, codes += kGroup) {
        scales[g] = quantize(x + g * kGroup, kGroup, codes);
        for (int half = 0; half < 2; ++half) {
          int sum = 0;
          for (int i = 0; i < 16; ++i) sum += codes[16 * half + i];
          sums[2 * g + half] = sum;
        }
      }
    }
  }

  int64_t groups() const { return groups_; }
  QuantizedToken operator[](int64_t token) const {
    return {codes_ + token * args_.features, scales_ + token * groups_, sums_ + token * groups_ * 2};
  }

 private:
  const LinearArgs& args_;
  const int64_t groups_;
  int8_t* const codes_;
  float* const scales_;
  int* const sums_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

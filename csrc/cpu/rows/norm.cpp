// RMSNorm and LayerNorm over rows or heads, with a residual added first where there is one. Statistics are in float: four
// chains of sixteen lanes along the row, then a fixed tree, so that a row's result depends on nothing but the row.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core

// residual += term(x), rounded to T.
template <class T, class Term>
void add_into(T* residual, const T* x, int64_t channels, const Term& term) {
  int64_t c = 0;
  for (; c + kLanes <= channels; c += kLanes) store(residual + c, add(load(residual + c), term(load(x + c))));
  const int rest = static_cast<int>(channels - c);
  if (rest) store_first(residual + c, add(load_first(residual + c, rest), term(load_first(x + c, rest))), rest);
}

// The sum over a row of term(v), which must be zero for the lanes of `padding`.
template <class T, class Term>
float sum(const T* x, int64_t channels, Vec padding, const Term& term) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  int64_t c = 0;
  for (; c + 4 * kLanes <= channels; c += 4 * kLanes)
    for (int i = 0; i < 4; ++i) sums[i] = term(load(x + c + i * kLanes), sums[i]);
  for (int i = 0; c < channels; c += kLanes, ++i) {
    const int rest = static_cast<int>(channels - c < kLanes ? channels - c : kLanes);
    sums[i] = term(keep_first(load_first(x + c, rest), rest, padding), sums[i]);
  }
  return reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
}

// y = (x - shift) * factor * (weight + weight_offset) + bias, with the weight and bias of head h. Without an offset nothing
// is added: it would make a 0 of -0.
template <class T, bool kOffset>
void scale_row(const NormArgs& args, int64_t h, const T* x, Vec shift, Vec factor, T* y) {
  const T* weight = args.weight ? static_cast<const T*>(args.weight) + h * args.weight_stride : nullptr;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + h * args.weight_stride : nullptr;
  const Vec offset = set1(args.weight_offset);
  for (int64_t c = 0; c < args.channels; c += kLanes) {
    const int n = static_cast<int>(args.channels - c < kLanes ? args.channels - c : kLanes);
    const auto get = [&](const T* row) { return n == kLanes ? load(row + c) : load_first(row + c, n); };
    Vec v = mul(sub(get(x), shift), factor);
    if (weight) v = mul(v, kOffset ? add(get(weight), offset) : get(weight));
    if (bias) v = add(v, get(bias));
    if (n == kLanes)
      store(y + c, v);
    else
      store_first(y + c, v, n);
  }
}

// Row or head h of a token.
template <class T, bool kCentred>
void norm_row(const NormArgs& args, int64_t h, const T* x, T* y) {
  const float scale = 1.0f / static_cast<float>(args.channels);
  Vec shift = zero();
  if (kCentred) shift = set1(scale * sum(x, args.channels, zero(), [](Vec v, Vec s) { return add(s, v); }));
  const float squares = sum(x, args.channels, shift, [&](Vec v, Vec s) {
    const Vec centred = sub(v, shift);
    return fma(centred, centred, s);
  });
  const Vec factor = set1(1.0f / __builtin_sqrtf(squares * scale + args.eps));
  if (args.weight_offset != 0)
    scale_row<T, true>(args, h, x, shift, factor, y);
  else
    scale_row<T, false>(args, h, x, shift, factor, y);
}

template <class T, bool kCentred>
void norm_as(const NormArgs& args) {
  const int64_t row = args.heads * args.channels;
  parallel_for(args.tokens, kGrainElements / (row + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      if (args.residual) {
        T* residual = static_cast<T*>(args.residual) + t * row;
        if (args.x_scale == 1.0f)
          add_into(residual, x, row, [](Vec v) { return v; });
        else
          add_into(residual, x, row, [&](Vec v) { return mul(v, set1(args.x_scale)); });
        x = residual;
      }
      T* y = static_cast<T*>(args.y) + t * row;
      for (int64_t h = 0; h < args.heads; ++h)
        norm_row<T, kCentred>(args, h, x + h * args.channels, y + h * args.channels);
    }
  });
}

template <bool kCentred>
void norm(const NormArgs& args) {
  switch (args.dtype) {
    case DType::float32: return norm_as<float, kCentred>(args);
    case DType::bfloat16: return norm_as<bf16, kCentred>(args);
    case DType::float16: return norm_as<fp16, kCentred>(args);
  }
}

}  // namespace

void rms_norm(const NormArgs& args) { norm<false>(args); }
void layer_norm(const NormArgs& args) { norm<true>(args); }

}  // namespace QUIRE_ISA
}  // namespace quire

// Rows times the SiLU of a gate, with an RMSNorm of groups of channels before or behind it. Sums are as those of
// rows/norm.cpp: by the row alone.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 8192;  // about 5 microseconds on one core

inline int lanes(int64_t left) { return static_cast<int>(left < kLanes ? left : kLanes); }

// 1 / rms of a group's numbers.
float factor_of(const float* x, int64_t channels, float eps) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  for (int64_t c = 0, i = 0; c < channels; c += kLanes, ++i) {
    const Vec v = load_first(x + c, lanes(channels - c));
    sums[i % 4] = fma(v, v, sums[i % 4]);
  }
  const float squares = reduce_add(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(channels) + eps);
}

template <class T>
void gate_row(const GatedNormArgs& args, int64_t t, float* row) {
  const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
  const T* gate = static_cast<const T*>(args.gate) + t * args.gate_stride;
  const T* weight = static_cast<const T*>(args.weight);
  T* y = static_cast<T*>(args.y) + t * args.channels;
  const Vec scale = set1(args.gate_scale);
  const auto gated = [&](int64_t c, Vec v, int n) {
    const Vec g = mul(load_first(gate + c, n), scale);
    return mul(v, mul(g, sigmoid(g)));
  };
  const bool first = weight && args.norm_first;
  for (int64_t c = 0; c < args.channels; c += kLanes) {
    const int n = lanes(args.channels - c);
    const Vec v = load_first(x + c, n);
    if (!weight)
      store_first(y + c, gated(c, v, n), n);
    else
      store_first(row + c, first ? v : gated(c, v, n), n);
  }
  if (!weight) return;
  const int64_t size = args.channels / args.groups;
  for (int64_t g = 0; g < args.channels; g += size) {
    const Vec factor = set1(factor_of(row + g, size, args.eps));
    for (int64_t c = g; c < g + size; c += kLanes) {
      const int n = lanes(g + size - c);
      const Vec v = mul(load_first(weight + c, n), mul(load_first(row + c, n), factor));
      store_first(y + c, first ? gated(c, v, n) : v, n);
    }
  }
}

template <class T>
void gated_norm_as(const GatedNormArgs& args) {
  parallel_for(args.tokens, kGrainElements / (args.channels + 1), [&](int64_t begin, int64_t end) {
    float* row = args.weight ? scratch<float, GatedNormArgs>(args.channels) : nullptr;
    for (int64_t t = begin; t < end; ++t) gate_row<T>(args, t, row);
  });
}

}  // namespace

void gated_norm(const GatedNormArgs& args) {
  switch (args.dtype) {
    case DType::float32: return gated_norm_as<float>(args);
    case DType::bfloat16: return gated_norm_as<bf16>(args);
    case DType::float16: return gated_norm_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

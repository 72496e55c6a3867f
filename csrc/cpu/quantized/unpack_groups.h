// Rows of groups (groups.h) as floats, with the bits of the `gguf` package's.
#pragma once

#include "cpu/quantized/groups.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class Kind>
struct UnpackGroups {
  static void row(const uint8_t* bytes, int64_t features, float* to) {
    Group32 group;
    for (int64_t k = 0; k < features; k += kGroup, to += kGroup) {
      Kind::take(bytes + k / Kind::kColumns * Kind::kBytes, static_cast<int>(k % Kind::kColumns / kGroup), &group);
      for (int half = 0; half < 2; ++half) {
        const float scale = Kind::kHalves ? group.scale * static_cast<float>(group.factors[half]) : group.scale;
        float minimum = Kind::kMinimum ? group.minimum : 0.0f;
        if constexpr (Kind::kHalves && Kind::kMinimum) minimum *= static_cast<float>(group.low[half]);
        for (int i = 16 * half; i < 16 * (half + 1); ++i) {
          const float product = scale * static_cast<float>(group.codes[i]);
          to[i] = Kind::kMinimum ? product + minimum : product;
        }
      }
    }
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

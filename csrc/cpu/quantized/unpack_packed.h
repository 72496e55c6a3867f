// Rows of codes behind their scales (affine and table kinds), of int8, and of 16 or 32 bits, as floats.
#pragma once

#include "cpu/quantized/numbers.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class T>
struct UnpackElements {
  static void row(const uint8_t* bytes, int64_t features, float* to) {
    const T* from = reinterpret_cast<const T*>(bytes);
    for (int64_t k = 0; k < features; k += kLanes) {
      const int n = static_cast<int>(features - k < kLanes ? features - k : kLanes);
      store_first(to + k, load_first(from + k, n), n);
    }
  }
};

struct UnpackInt8 {
  static void row(const uint8_t* bytes, int64_t features, float* to) {
    const float scale = read<float>(bytes);
    const int8_t* codes = reinterpret_cast<const int8_t*>(bytes + sizeof scale);
    for (int64_t k = 0; k < features; ++k) to[k] = static_cast<float>(codes[k]) * scale;
  }
};

// Where a row's parts lie.
template <int kBits>
struct PackedRow {
  const uint8_t *scales, *zeros, *codes;
  int64_t group;

  PackedRow(const RowFormat& format, const uint8_t* row, int64_t features)
      : scales(row), zeros(nullptr), codes(row), group(format.group > 0 ? format.group : features) {
    const int64_t bytes = (features + group - 1) / group * static_cast<int64_t>(sizeof(float));
    codes += bytes;
    if (format.zeros) zeros = codes, codes += bytes;
  }
  int code(int64_t k) const { return kBits == 8 ? codes[k] : codes[k / 2] >> k % 2 * 4 & 15; }
};

template <int kBits>
struct UnpackAffine {
  static void row(const RowFormat& format, const uint8_t* bytes, int64_t features, float* to) {
    const PackedRow<kBits> row(format, bytes, features);
    const int32_t* groups = static_cast<const int32_t*>(format.aux);
    for (int64_t k = 0; k < features; ++k) {
      const int64_t group = groups ? groups[k] : k / row.group;
      const float zero = row.zeros ? read<float>(row.zeros + 4 * group) : static_cast<float>(1 << (kBits - 1));
      to[k] = (static_cast<float>(row.code(k)) - zero) * read<float>(row.scales + 4 * group);
    }
  }
};

template <int kBits>
struct UnpackTable {
  static void row(const RowFormat& format, const uint8_t* bytes, int64_t features, float* to) {
    const PackedRow<kBits> row(format, bytes, features);
    const float* table = static_cast<const float*>(format.aux);
    for (int64_t k = 0; k < features; ++k) to[k] = table[row.code(k)] * read<float>(row.scales + 4 * (k / row.group));
  }
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

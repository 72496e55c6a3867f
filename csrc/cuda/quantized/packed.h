// Rows of codes behind their scales (affine, table and int8 rows), whose bytes start at multiples of 4; and rows of
// floats of another width than x's.
#pragma once

#include "cuda/quantized/bytes.h"

namespace quire::cuda {

// kTable: codes are places in a table. Of a row whose groups are 8 columns times a power of two, or more, and in order,
// scales come with the codes; else each column's is looked up. kAny: groups may be of any size.
template <int kBits, bool kTable, bool kAny>
struct Packed {
  static constexpr int kRegisters = kBits == 8 && !kTable ? 24 : 0;
  struct Share {
    uint32_t codes[2][kBits / 4];
    float scale[2], zero[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout& layout, const uint8_t* row,
                                               const Columns& at) {
    const int k = at.first();
    const uint8_t* codes = row + layout.codes + static_cast<int64_t>(k) * kBits / 8;
    share.codes[at.run][0] = read<uint32_t>(codes);
    // A row's last word is filled up; there is none behind it.
    if constexpr (kBits == 8) share.codes[at.run][1] = k + 4 < at.features ? read<uint32_t>(codes + 4) : 0;
    if (looked_up(layout)) return;
    share.scale[at.run] = scale_at(row, k >> layout.group_shift);
    if constexpr (!kTable) share.zero[at.run] = zero_at(layout, row, k >> layout.group_shift);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout& layout,
                                                const uint8_t* row, const Columns& at) {
    const int k = at.first();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float scale = share.scale[at.run], zero = share.zero[at.run];
      if (looked_up(layout)) {
        const int group = group_of(layout, min(k + i, at.features - 1));
        scale = scale_at(row, group);
        if constexpr (!kTable) zero = zero_at(layout, row, group);
      }
      if constexpr (kTable) {
        values[i] = __ldg(static_cast<const float*>(layout.aux) + code(share, at.run, i)) * scale;
      } else {
        values[i] = (number(share, layout, at.run, i) - zero) * scale;
      }
      if (k + i >= at.features) values[i] = 0;
    }
  }

 private:
  static __device__ __forceinline__ bool looked_up(const RowsLayout& layout) {
    if constexpr (kTable) return kAny && layout.group_shift < 3;
    return layout.aux != nullptr || (kAny && layout.group_shift < 3);
  }
  static __device__ __forceinline__ int group_of(const RowsLayout& layout, int k) {
    if (!kTable && layout.aux)
      return static_cast<int>(min(__ldg(static_cast<const uint32_t*>(layout.aux) + k), layout.groups - 1u));
    return k / layout.group;
  }
  static __device__ __forceinline__ float scale_at(const uint8_t* row, int group) {
    return read<float>(row + static_cast<int64_t>(4) * group);
  }
  static __device__ __forceinline__ float zero_at(const RowsLayout& layout, const uint8_t* row, int group) {
    if (!layout.zeros) return 1 << (kBits - 1);
    return read<float>(row + layout.zeros + static_cast<int64_t>(4) * group);
  }
  static __device__ __forceinline__ uint32_t code(const Share& share, int run, int i) {
    return kBits == 4 ? share.codes[run][0] >> (4 * i) & 15u : share.codes[run][i * kBits / 32] >> (8 * (i % 4)) & 255u;
  }
  static __device__ __forceinline__ float number(const Share& share, const RowsLayout& layout, int run, int i) {
    if constexpr (kBits == 4) return byte_at(share.codes[run][0] >> (4 * (i % 2)) & 0x0f0f0f0fu, i / 2);
    return byte_at(share.codes[run][i * kBits / 32] ^ layout.flip, i % 4);
  }
};

// Rows of floats, as E.
template <class E>
struct Floats {
  static constexpr int kRegisters = 0;
  struct Share {
    E values[2][8];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    const E* from = reinterpret_cast<const E*>(row) + at.first();
#pragma unroll
    for (int i = 0; i < 8; ++i) share.values[at.run][i] = at.first() + i < at.features ? from[i] : E{};
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t*, const Columns& at) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = to_float(share.values[at.run][i]);
  }
};

}  // namespace quire::cuda

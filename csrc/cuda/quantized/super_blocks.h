// GGML's kinds whose blocks have 256 columns: four units. They lie in halves of 128, or quarters of 64, whose bytes hold
// a column of each run: so a unit's two runs come out of the same bytes, at one lane.
#pragma once

#include "cuda/quantized/bytes.h"

namespace quire::cuda {

template <int kBytes>
struct BlockOf256 {
  static constexpr int kRegisters = 0;

  static __device__ __forceinline__ const uint8_t* block(const uint8_t* row, const Columns& at) {
    return row + static_cast<int64_t>(at.block()) * kBytes;
  }
  // Of a block's 128 columns, and of their 64.
  static __device__ __forceinline__ int half(const Columns& at) { return at.unit_of_block() / 2; }
  static __device__ __forceinline__ int quarter(const Columns& at) { return at.unit_of_block() % 2; }
};

// [scale, minimum, 12 bytes with 8 scales and 8 minimums of 6 bits][fifth bits][nibbles]
template <bool kFifth>
struct FourOrFive : BlockOf256<kFifth ? 176 : 144> {
  using Base = BlockOf256<kFifth ? 176 : 144>;
  struct Share {
    uint4 header;
    uint2 codes, high;
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    if (at.run == 1) return;
    const uint8_t* block = Base::block(row, at);
    share.header = read<uint4>(block);
    share.codes = read<uint2>(block + (kFifth ? 48 : 16) + 32 * at.unit_of_block() + 8 * at.t);
    if constexpr (kFifth) share.high = read<uint2>(block + 16 + 8 * at.t);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t*, const Columns& at) {
    const int number = 2 * at.unit_of_block() + at.run, shift = 8 * (number % 4);
    const uint32_t a = share.header.y >> shift, b = share.header.z >> shift, c = share.header.w >> shift;
    const bool first = number < 4;
    const uint32_t scales = first ? a & 63 : (c & 15) | (a >> 2 & 48);
    const uint32_t minimums = first ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
    const float scale = half_at(share.header.x, 0) * small(scales);
    const float minimum = half_at(share.header.x, 1) * small(minimums);
    uint2 codes = nibbles(share.codes, at.run == 1);
    if constexpr (kFifth) {
      codes.x |= (share.high.x >> number & 0x01010101u) << 4;
      codes.y |= (share.high.y >> number & 0x01010101u) << 4;
    }
    for_eight(values, codes, 0, [&](float code) { return scale * code - minimum; });
  }
};
using Q4_K = FourOrFive<false>;
using Q5_K = FourOrFive<true>;

// [128 bytes of nibbles][64 of two bits][16 int8 scales][scale]
struct Q6_K : BlockOf256<210> {
  struct Share {
    AnyEight low[2], high;
    uint32_t scales[2];
    uint32_t scale;
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    const uint8_t* block = Q6_K::block(row, at);
    share.low[at.run].fetch(low(block, at));
    share.scales[at.run] = read<uint8_t>(block + 192 + 8 * half(at) + 4 * quarter(at) + 2 * at.run + at.t / 2);
    if (at.run == 1) return;
    share.high.fetch(high(block, at));
    share.scale = read<uint16_t>(block + 208);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const uint8_t* block = Q6_K::block(row, at);
    const float scale = half_at(share.scale, 0) * byte_at(share.scales[at.run] ^ 0x80u, 0, 128);
    const uint2 low = nibbles(share.low[at.run].bytes(Q6_K::low(block, at)), quarter(at) == 1);
    const uint2 high = share.high.bytes(Q6_K::high(block, at));
    const int shift = 4 * quarter(at) + 2 * at.run;
    for_eight(values,
              make_uint2(low.x | (high.x >> shift & 0x03030303u) << 4, low.y | (high.y >> shift & 0x03030303u) << 4),
              32, [&](float code) { return scale * code; });
  }

 private:
  static __device__ __forceinline__ const uint8_t* low(const uint8_t* block, const Columns& at) {
    return block + 64 * half(at) + 32 * at.run + 8 * at.t;
  }
  static __device__ __forceinline__ const uint8_t* high(const uint8_t* block, const Columns& at) {
    return block + 128 + 32 * half(at) + 8 * at.t;
  }
};

// [16 bytes: a scale and a minimum of 4 bits each][64 of two bits][scale, minimum]
struct Q2_K : BlockOf256<84> {
  struct Share {
    uint2 codes;
    uint32_t scales, numbers;
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    if (at.run == 1) return;
    const uint8_t *block = Q2_K::block(row, at), *codes = block + 16 + 32 * half(at) + 8 * at.t;
    share.codes = make_uint2(read<uint32_t>(codes), read<uint32_t>(codes + 4));
    share.scales = read<uint32_t>(block + 4 * at.unit_of_block());
    share.numbers = read<uint32_t>(block + 80);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t*, const Columns& at) {
    const uint32_t both = share.scales >> (8 * (2 * at.run + at.t / 2));
    const float scale = half_at(share.numbers, 0) * small(both & 15);
    const float minimum = half_at(share.numbers, 1) * small(both >> 4 & 15);
    const int shift = 4 * quarter(at) + 2 * at.run;
    for_eight(values, make_uint2(share.codes.x >> shift & 0x03030303u, share.codes.y >> shift & 0x03030303u), 0,
              [&](float code) { return scale * code - minimum; });
  }
};

// [32 bytes of third bits, whose zeros count 4 less][64 of two bits][12 with 16 scales of 6 bits][scale]
struct Q3_K : BlockOf256<110> {
  struct Share {
    AnyEight low, high;
    uint32_t scale_low[2], scale_high[2];
    uint32_t scale;
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    const uint8_t* block = Q3_K::block(row, at);
    const int number = 2 * at.run + at.t / 2;
    share.scale_low[at.run] = read<uint8_t>(block + 96 + 4 * quarter(at) + number);
    share.scale_high[at.run] = read<uint8_t>(block + 104 + number);
    if (at.run == 1) return;
    share.low.fetch(low(block, at));
    share.high.fetch(block + 8 * at.t);
    share.scale = read<uint16_t>(block + 108);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const uint8_t* block = Q3_K::block(row, at);
    const uint32_t scales = (share.scale_low[at.run] >> (4 * half(at)) & 15u) |
                            (share.scale_high[at.run] >> (2 * at.unit_of_block()) & 3u) << 4;
    const float scale = half_at(share.scale, 0) * (small(scales) - 32);
    const uint2 low = share.low.bytes(Q3_K::low(block, at)), high = share.high.bytes(block + 8 * at.t);
    const int shift = 4 * quarter(at) + 2 * at.run, bit = 2 * at.unit_of_block() + at.run;
    for_eight(values,
              make_uint2((low.x >> shift & 0x03030303u) | (high.x >> bit & 0x01010101u) << 2,
                         (low.y >> shift & 0x03030303u) | (high.y >> bit & 0x01010101u) << 2),
              4, [&](float code) { return scale * code; });
  }

 private:
  static __device__ __forceinline__ const uint8_t* low(const uint8_t* block, const Columns& at) {
    return block + 32 + 32 * half(at) + 8 * at.t;
  }
};

}  // namespace quire::cuda

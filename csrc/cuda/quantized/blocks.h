// GGML's kinds whose blocks have 32 columns: one a run. Column i of a block of nibbles is the low half of byte i, column
// 16 + i the high half.
#pragma once

#include "cuda/quantized/bytes.h"

namespace quire::cuda {

// kHeader bytes come before kHigh ones with the columns' fifth bits, and before the codes.
template <int kHeader, int kHigh, int kCodes>
struct BlockOf32 {
  static constexpr int kBytes = kHeader + kHigh + kCodes, kRegisters = 0;

  static __device__ __forceinline__ const uint8_t* block(const uint8_t* row, const Columns& at) {
    return row + static_cast<int64_t>(2 * at.unit + at.run) * kBytes;
  }
  // A lane's eight bytes of nibbles, or of bytes.
  static __device__ __forceinline__ const uint8_t* codes(const uint8_t* row, const Columns& at) {
    return block(row, at) + kHeader + kHigh + 8 * (kCodes == 16 ? at.t % 2 : at.t);
  }
  static __device__ __forceinline__ uint32_t high_bits(const uint8_t* row, const Columns& at) {
    return read<uint8_t>(block(row, at) + kHeader + at.t);
  }
  static __device__ __forceinline__ uint2 with_high_bits(uint2 codes, uint32_t bits) {
    return make_uint2(codes.x | spread(bits) << 4, codes.y | spread(bits >> 4) << 4);
  }
};

struct Q8_0 : BlockOf32<2, 0, 32> {
  struct Share {
    AnyEight codes[2];
    uint32_t scale[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    share.codes[at.run].fetch(codes(row, at));
    share.scale[at.run] = read<uint16_t>(block(row, at));
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const uint2 bytes = share.codes[at.run].bytes(codes(row, at));
    const float scale = half_at(share.scale[at.run], 0);
    for_eight(values, make_uint2(bytes.x ^ 0x80808080u, bytes.y ^ 0x80808080u), 128,
              [&](float code) { return code * scale; });
  }
};

struct Q4_0 : BlockOf32<2, 0, 16> {
  struct Share {
    AnyEight codes[2];
    uint32_t scale[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    share.codes[at.run].fetch(codes(row, at));
    share.scale[at.run] = read<uint16_t>(block(row, at));
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const float scale = half_at(share.scale[at.run], 0);
    for_eight(values, nibbles(share.codes[at.run].bytes(codes(row, at)), at.t >= 2), 8,
              [&](float code) { return scale * code; });
  }
};

struct Q4_1 : BlockOf32<4, 0, 16> {
  struct Share {
    uint2 codes[2];
    uint32_t numbers[2];  // scale, minimum
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    const uint8_t* from = codes(row, at);
    share.codes[at.run] = make_uint2(read<uint32_t>(from), read<uint32_t>(from + 4));
    share.numbers[at.run] = read<uint32_t>(block(row, at));
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t*, const Columns& at) {
    const float scale = half_at(share.numbers[at.run], 0), minimum = half_at(share.numbers[at.run], 1);
    for_eight(values, nibbles(share.codes[at.run], at.t >= 2), 0, [&](float code) { return scale * code + minimum; });
  }
};

struct Q5_0 : BlockOf32<2, 4, 16> {
  struct Share {
    AnyEight codes[2];
    uint32_t scale[2];
    uint32_t high[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    share.codes[at.run].fetch(codes(row, at));
    share.scale[at.run] = read<uint16_t>(block(row, at));
    share.high[at.run] = high_bits(row, at);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const float scale = half_at(share.scale[at.run], 0);
    const uint2 low = nibbles(share.codes[at.run].bytes(codes(row, at)), at.t >= 2);
    for_eight(values, with_high_bits(low, share.high[at.run]), 16, [&](float code) { return scale * code; });
  }
};

struct Q5_1 : BlockOf32<4, 4, 16> {
  struct Share {
    uint2 codes[2];
    uint32_t numbers[2];  // scale, minimum
    uint32_t high[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    share.codes[at.run] = read<uint2>(codes(row, at));
    share.numbers[at.run] = read<uint32_t>(block(row, at));
    share.high[at.run] = high_bits(row, at);
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t*, const Columns& at) {
    const float scale = half_at(share.numbers[at.run], 0), minimum = half_at(share.numbers[at.run], 1);
    const uint2 low = nibbles(share.codes[at.run], at.t >= 2);
    for_eight(values, with_high_bits(low, share.high[at.run]), 0, [&](float code) { return scale * code + minimum; });
  }
};

// e2m1 numbers, twice as large, times half a power of two (OCP Microscaling Formats v1.0).
struct Mxfp4 : BlockOf32<1, 0, 16> {
  struct Share {
    AnyEight codes[2];
    uint32_t exponent[2];
  };
  static __device__ __forceinline__ void fetch(Share& share, const RowsLayout&, const uint8_t* row, const Columns& at) {
    share.codes[at.run].fetch(codes(row, at));
    share.exponent[at.run] = read<uint8_t>(block(row, at));
  }
  static __device__ __forceinline__ void values(float (&values)[8], const Share& share, const RowsLayout&,
                                                const uint8_t* row, const Columns& at) {
    const uint32_t exponent = share.exponent[at.run];
    const float scale = __uint_as_float(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
    const uint2 codes = nibbles(share.codes[at.run].bytes(Mxfp4::codes(row, at)), at.t >= 2);
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = scale * number((i < 4 ? codes.x : codes.y) >> (8 * (i % 4)));
  }

 private:
  // Twice the number of the four lowest bits: as a float's exponent and mantissa they are it, 2^127 times too small. A
  // zero has no sign.
  static __device__ __forceinline__ float number(uint32_t code) {
    const float tiny = __uint_as_float((code << 22 & 0x01c00000u) | (code << 28 & 0x80000000u));
    return tiny * 1.7014118346046923e38f + 0.0f;
  }
};

}  // namespace quire::cuda

// Rows of bytes: where their parts lie, and how eight columns at a time come out of memory and become floats.
//
// A kind of row is a struct with a Share, what a lane needs for its eight columns of each of a unit's two runs
// (linear/product.h), and two functions. `fetch` starts a run's loads and looks at nothing that it loads; `values` makes
// the run's eight floats, by the operations, in the order, that kernels/dequantize.py has. Kinds whose runs share bytes
// load them with the first. Neither is called for columns from `features` on. kRegisters: how many `values` needs more
// than those of most kinds.
#pragma once

#include "cuda/common/device.h"
#include "cuda/linear/product.h"

namespace quire::cuda {

// What the host makes of a RowFormat. Of GGML's kinds nothing but row_bytes is looked at.
struct RowsLayout {
  const void* aux;
  int64_t row_bytes;
  uint32_t groups;  // scales
  int group;        // columns of a scale
  int group_shift;  // its logarithm, where it is a power of two (31: one group); else -1
  int zeros;        // the byte at which zeros start; 0: there are none
  int codes;        // the byte at which codes start
  uint32_t flip;    // bits of codes to be turned over: those of signed ones' signs
};

// Where a lane's eight columns are.
struct Columns {
  int unit, run, t, features;
  __device__ __forceinline__ int first() const { return unit * kUnit + run * kRun + 8 * t; }
  // Blocks of 256 columns have 4 units.
  __device__ __forceinline__ int block() const { return unit / 4; }
  __device__ __forceinline__ int unit_of_block() const { return unit % 4; }
};

template <class T>
__device__ __forceinline__ T read(const uint8_t* from) {
  return __ldg(reinterpret_cast<const T*>(from));
}
__device__ __forceinline__ float half_at(uint32_t word, int place) {
  return to_float(f16{static_cast<uint16_t>(word >> (16 * place))});
}

// Eight bytes at any address: the two or three aligned words that they lie in, and the bytes themselves.
struct AnyEight {
  uint32_t words[3];

  __device__ __forceinline__ void fetch(const uint8_t* from) {
    const int within = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4);
    const uint8_t* aligned = from - within;
    words[0] = read<uint32_t>(aligned), words[1] = read<uint32_t>(aligned + 4);
    words[2] = within ? read<uint32_t>(aligned + 8) : 0;
  }
  __device__ __forceinline__ uint2 bytes(const uint8_t* from) const {
    const unsigned shift = static_cast<unsigned>(reinterpret_cast<uintptr_t>(from) % 4) * 8;
    return make_uint2(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift));
  }
};

// Byte `place` of a word, less a whole number, exactly: in the last bits of 2^23 it is one instruction from float.
__device__ __forceinline__ float byte_at(uint32_t word, int place, float less = 0) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + static_cast<unsigned>(place))) - (8388608.0f + less);
}
__device__ __forceinline__ float small(uint32_t value) { return __uint_as_float(0x4b000000u | value) - 8388608.0f; }

// Bits 0 .. 3 as the lowest bits of four bytes.
__device__ __forceinline__ uint32_t spread(uint32_t bits) { return (bits & 15u) * 0x00204081u & 0x01010101u; }

// Half a byte of each of eight.
__device__ __forceinline__ uint2 nibbles(uint2 bytes, bool high) {
  const int shift = high ? 4 : 0;
  return make_uint2(bytes.x >> shift & 0x0f0f0f0fu, bytes.y >> shift & 0x0f0f0f0fu);
}

template <class Make>
__device__ __forceinline__ void for_eight(float (&values)[8], uint2 codes, float less, const Make& make) {
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = make(byte_at(i < 4 ? codes.x : codes.y, i % 4, less));
}

}  // namespace quire::cuda

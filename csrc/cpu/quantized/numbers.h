// Numbers as they lie in quantized rows, at any address, read one at a time. None depends on how denormals are treated.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class T>
inline T read(const void* p) {
  T value;
  __builtin_memcpy(&value, p, sizeof value);
  return value;
}

inline float as_float(uint32_t bits) { return read<float>(&bits); }

inline float half_at(const void* p) {
  const uint16_t bits = read<uint16_t>(p);
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#else
  // The product rebiases the exponent from 15 to 127, subnormals included; only infinity and NaN need help.
  const float scaled = as_float(static_cast<uint32_t>(bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000 : 0;
  return as_float(read<uint32_t>(&scaled) | special | static_cast<uint32_t>(bits & 0x8000) << 16);
#endif
}

// Half of two to the power e - 127: the scale of twice an e2m1.
inline float half_e8m0(uint8_t e) { return as_float(e < 2 ? 0x00200000u << e : static_cast<uint32_t>(e - 1) << 23); }

// Twice an e2m1's value (OCP Microscaling Formats v1.0).
inline int twice_e2m1(int code) {
  constexpr int8_t kValues[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return kValues[code];
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// Two ways to one sum of products of bf16: vdpbf16ps, and floats.
//
// vdpbf16ps adds the product of each pair's second elements, then that of the first, each with one rounding, and takes
// denormals for zeros. Floats do the same in two multiply_adds of the split pairs (SplitPairs, FlushDenormals). A kernel
// may take the one or the other by how much there is to do: no bit tells.
#pragma once

#include "cpu/common/units.h"

namespace quire {
namespace QUIRE_ISA {

#if defined(__AVX512BF16__)

// bf16 as they lie, to be multiplied as floats.
struct SplitPairs : bf16 {};

template <>
struct Units<SplitPairs> : UnitsOfPairs {};

// Whether to, with so many tokens: on Intel's processors vdpbf16ps does half as many products a second as floats do (86
// and 170 GFLOP/s a core, model 207), on AMD's twice as many. With one token or two, memory is the limit.
inline bool splits_pairs(int64_t tokens) {
  static const bool slow = __builtin_cpu_is("intel");
  return slow && tokens > 2;
}

#endif

// While it lives, its thread takes denormals for zeros where vdpbf16ps does.
template <class T>
struct FlushDenormals {
  FlushDenormals() {}  // says that it is used
};

#if defined(__AVX512BF16__)
template <>
struct FlushDenormals<bf16> {
  static constexpr unsigned kResults = 0x8000, kOperands = 0x40;  // of the register's bits
  const unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | kResults | kOperands); }
  ~FlushDenormals() { _mm_setcsr(before); }
};
template <>
struct FlushDenormals<SplitPairs> : FlushDenormals<bf16> {};
#endif

}  // namespace QUIRE_ISA
}  // namespace quire

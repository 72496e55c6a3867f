// Runs of values to and from memory, 16 bytes at a time.
#pragma once

#include "cuda/common/device.h"

namespace quire::cuda {

// Whether all of these can be read 16 bytes at a time; null is.
template <class... Pointers>
bool are_aligned(const Pointers*... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}

template <class T>
union Vector {
  uint4 words;
  T values[16 / sizeof(T)];
};

// kCount values from memory as float: one, or the 16 bytes of a vector, aligned.
template <int kCount, class T>
__device__ __forceinline__ void load(float (&values)[kCount], const T* from) {
  if constexpr (kCount == 1) {
    values[0] = to_float(*from);
  } else {
    static_assert(kCount * sizeof(T) == 16);
    Vector<T> vector;
    vector.words = *reinterpret_cast<const uint4*>(from);
    for (int i = 0; i < kCount; ++i) values[i] = to_float(vector.values[i]);
  }
}

template <int kCount, class T>
__device__ __forceinline__ void store(T* to, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *to = from_float<T>(values[0]);
  } else {
    static_assert(kCount * sizeof(T) == 16);
    Vector<T> vector;
    for (int i = 0; i < kCount; ++i) vector.values[i] = from_float<T>(values[i]);
    *reinterpret_cast<uint4*>(to) = vector.words;
  }
}

}  // namespace quire::cuda

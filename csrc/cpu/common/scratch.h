// Working memory of a thread, for as long as the thread lives.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace quire {
namespace QUIRE_ISA {
namespace {

// At least `count` elements, 64-byte aligned, with what the last call for the same User left in them or anything else.
template <class T, class User>
inline T* scratch(int64_t count) {
  struct Buffer {
    T* data = nullptr;
    int64_t size = 0;
    ~Buffer() { free(data); }
  };
  static thread_local Buffer buffer;
  if (buffer.size < count) {
    free(buffer.data);
    buffer.size = (count + 1023) / 1024 * 1024;
    buffer.data = static_cast<T*>(aligned_alloc(64, buffer.size * sizeof(T)));
    if (!buffer.data) abort();
  }
  return buffer.data;
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// Working memory of a thread, for as long as the thread lives.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace quire {
namespace QUIRE_ISA {
namespace {

// While one lives, what `scratch` gives its thread lies one behind the other in given memory, rather than each time in the
// same place for a User: for things of one kind that are there together. Without memory, it is only counted.
class Apart {
 public:
  explicit Apart(char* memory) : memory_(memory), before_(current()) { current() = this; }
  ~Apart() { current() = before_; }
  Apart(const Apart&) = delete;

  int64_t bytes() const { return bytes_; }

  void* take(int64_t bytes) {
    char* own = memory_ ? memory_ + bytes_ : nullptr;
    bytes_ += (bytes + 127) / 64 * 64;  // vectors may be put over the end
    return own;
  }
  static Apart*& current() {
    static thread_local Apart* one = nullptr;
    return one;
  }

 private:
  char* const memory_;
  Apart* const before_;
  int64_t bytes_ = 0;
};

// At least `count` elements, 64-byte aligned, with what the last call for the same User left in them or anything else.
template <class T, class User>
inline T* scratch(int64_t count) {
  if (Apart* apart = Apart::current()) return static_cast<T*>(apart->take(count * static_cast<int64_t>(sizeof(T))));
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

// CUDA on the host, for tests: each thread of a block is a fiber, and one block runs after the other.
//
// It is strict where a GPU is lenient. A warp runs on alone until it meets a barrier, the warps in an order that
// QUIRE_EMULATOR_SEED changes; asynchronous copies are made at the very beginning or only when they are waited for, by
// the same seed: what lacks a barrier or a wait reads wrong numbers. Shared memory is poisoned with NaN before each
// block, and what lies past its end cannot be touched. A barrier that some threads never reach is an error, not a hang.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) alignas(n)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace quire::emulator {

struct Position {
  dim3 thread, block, block_size, grid;
};
extern Position position;  // of the running thread

// Runs `body` once for every thread of the grid. Throws std::runtime_error where a barrier can never be passed.
void run(dim3 grid, dim3 block, size_t shared, const std::function<void()>& body);

char* shared_memory();
void synchronize_block();
// Gives every lane of the warp's `size` bytes (at most 64) to all: lane i's are at [64 i]. Good until its next call but
// one.
const char* exchange(const void* own, size_t size);
void copy_async(void* to, const void* from, int bytes, bool valid);
void copy_async_commit();
void copy_async_wait(int groups);

template <class T>
T from_lane(T value, int lane) {
  T result;
  memcpy(&result, exchange(&value, sizeof value) + 64 * (lane & 31), sizeof result);
  return result;
}
inline int lane() {
  const Position& p = position;
  return static_cast<int>((p.thread.x + p.block_size.x * (p.thread.y + p.block_size.y * p.thread.z)) % 32);
}

}  // namespace quire::emulator

#define threadIdx (::quire::emulator::position.thread)
#define blockIdx (::quire::emulator::position.block)
#define blockDim (::quire::emulator::position.block_size)
#define gridDim (::quire::emulator::position.grid)

inline void __syncthreads() { quire::emulator::synchronize_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) {
  const char nothing = 0;
  quire::emulator::exchange(&nothing, 1);
}
template <class T>
T __shfl_sync(unsigned, T value, int lane) {
  return quire::emulator::from_lane(value, lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return quire::emulator::from_lane(value, quire::emulator::lane() ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  const int lane = quire::emulator::lane(), from = lane + static_cast<int>(delta);
  return quire::emulator::from_lane(value, from < 32 ? from : lane);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned delta) {
  const int lane = quire::emulator::lane(), from = lane - static_cast<int>(delta);
  return quire::emulator::from_lane(value, from >= 0 ? from : lane);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const char* all = quire::emulator::exchange(&predicate, sizeof predicate);
  unsigned bits = 0;
  for (int i = 0; i < 32; ++i) {
    int value;
    memcpy(&value, all + 64 * i, sizeof value);
    bits |= static_cast<unsigned>(value != 0) << i;
  }
  return bits;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == 0xffffffffu; }

// One thread runs at a time.
template <class T, class U>
T atomicAdd(T* address, U value) {
  const T old = *address;
  *address = static_cast<T>(old + value);
  return old;
}
template <class T, class U>
T atomicMax(T* address, U value) {
  const T old = *address;
  *address = std::max(old, static_cast<T>(value));
  return old;
}
template <class T, class U>
T atomicMin(T* address, U value) {
  const T old = *address;
  *address = std::min(old, static_cast<T>(value));
  return old;
}

inline float __uint_as_float(uint32_t x) {
  float y;
  memcpy(&y, &x, 4);
  return y;
}
inline uint32_t __float_as_uint(float x) {
  uint32_t y;
  memcpy(&y, &x, 4);
  return y;
}
// Four of eight bytes, by the low three bits of each hexadecimal digit of `selector`.
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) y |= static_cast<uint32_t>(both >> (8 * (selector >> (4 * i) & 7)) & 255) << (8 * i);
  return y;
}
// The low word of both, shifted right by the low five bits of `shift`.
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, unsigned shift) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T>
T __ldg(const T* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T)) __builtin_trap();  // as a GPU does
  return *p;
}
using std::max;
using std::min;

namespace quire::cuda {

using Stream = void*;
struct bf16;
struct f16;

float to_float(bf16 x);
float to_float(f16 x);
inline float to_float(float x) { return x; }
template <class T>
T from_float(float x);
template <class T>
uint32_t pack2(float low, float high);
template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);
void ldmatrix4(uint32_t (&out)[4], const void* row);
void ldmatrix4_transposed(uint32_t (&out)[4], const void* row);

inline float exp2_fast(float x) { return exp2f(x); }
inline void copy_async16(void* shared, const void* from, bool valid) { emulator::copy_async(shared, from, 16, valid); }
inline void copy_async_commit() { emulator::copy_async_commit(); }
template <int kGroups>
void copy_async_wait() {
  emulator::copy_async_wait(kGroups);
}
inline uint4 load_once16(const void* from) {
  uint4 y;
  if (reinterpret_cast<uintptr_t>(from) % 16) __builtin_trap();  // as a GPU does
  memcpy(&y, from, 16);
  return y;
}
inline char* dynamic_shared() { return emulator::shared_memory(); }

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  emulator::run(grid, block, shared, [&] { kernel(static_cast<Parameters>(arguments)...); });
}

}  // namespace quire::cuda

// Kernels with faults, for test_emulator.py: each is right where `right` says so. A check returns null, or what was
// thrown.
#include "cuda/common/kernels.h"

#include <exception>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;

const char* caught(void (*kernel)(float*, const float*, bool), float* out, const float* from, bool right) {
  static std::string message;
  try {
    launch(kernel, dim3(2), dim3(kThreads), kThreads * sizeof(float), nullptr, out, from, right);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

float* place(float* out) { return out + blockIdx.x * kThreads + threadIdx.x; }
float* shared() { return reinterpret_cast<float*>(dynamic_shared()); }

// What the thread 32 on has written.
void barrier(float* out, const float* from, bool right) {
  shared()[threadIdx.x] = from[threadIdx.x];
  if (right) __syncthreads();
  *place(out) = shared()[(threadIdx.x + 32) % kThreads];
}

// What the next lane has written.
void warp_barrier(float* out, const float* from, bool right) {
  shared()[threadIdx.x] = from[threadIdx.x];
  if (right) __syncwarp();
  *place(out) = shared()[threadIdx.x ^ 1];
}

void wait(float* out, const float* from, bool right) {
  if (threadIdx.x % 4 == 0) copy_async16(shared() + threadIdx.x, from + threadIdx.x, true);
  copy_async_commit();
  if (right) copy_async_wait<0>();
  __syncthreads();
  *place(out) = shared()[threadIdx.x];
}

// The younger of two groups, the older of which is empty.
void wait_for_younger(float* out, const float* from, bool right) {
  copy_async_commit();
  if (threadIdx.x % 4 == 0) copy_async16(shared() + threadIdx.x, from + threadIdx.x, true);
  copy_async_commit();
  if (right) {
    copy_async_wait<0>();
  } else {
    copy_async_wait<1>();
  }
  __syncthreads();
  *place(out) = shared()[threadIdx.x];
}

void commit(float* out, const float* from, bool right) {
  if (threadIdx.x % 4 == 0) copy_async16(shared() + threadIdx.x, from + threadIdx.x, true);
  if (right) copy_async_commit();
  copy_async_wait<0>();
  __syncthreads();
  *place(out) = shared()[threadIdx.x];
}

// A copy over what others may still read.
void reuse(float* out, const float* from, bool right) {
  shared()[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  if (!right && threadIdx.x % 4 == 0) copy_async16(shared() + (threadIdx.x + 32) % kThreads, from, false);
  *place(out) = shared()[threadIdx.x];
  __syncthreads();
  if (right && threadIdx.x % 4 == 0) copy_async16(shared() + (threadIdx.x + 32) % kThreads, from, false);
  copy_async_commit();
  copy_async_wait<0>();
}

void divergence(float* out, const float* from, bool right) {
  float x = from[threadIdx.x];
  if (right || threadIdx.x % kWarp < 16) {
    __syncthreads();
  } else {
    x = __shfl_xor_sync(kAllLanes, x, 0);
  }
  *place(out) = x;
}

void half_a_warp(float* out, const float* from, bool right) {
  float x = from[threadIdx.x];
  if (right || threadIdx.x % kWarp < 16) x = __shfl_xor_sync(kAllLanes, x, 0);
  *place(out) = x;
}

void uninitialised(float* out, const float* from, bool right) {
  if (right) shared()[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  *place(out) = shared()[threadIdx.x];
  __syncthreads();
  shared()[threadIdx.x] = from[threadIdx.x];  // which the next block must not see
}

void past_the_end(float* out, const float* from, bool right) {
  shared()[threadIdx.x] = from[threadIdx.x];
  *place(out) = shared()[threadIdx.x + (right ? 0 : kThreads)];
}

// [16, 16] times [16, 16], fragments as device.h describes them; or by ldmatrix.
template <class T>
void multiply(const T* a, const T* b, float* c, bool by_ldmatrix) {
  auto* tiles = reinterpret_cast<T*>(dynamic_shared());
  for (int i = static_cast<int>(threadIdx.x); i < 256; i += kWarp) tiles[i] = a[i], tiles[256 + i] = b[i];
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x), group = lane / 4, pair = 2 * (lane % 4);
  uint32_t own[4], columns[4];
  if (by_ldmatrix) {
    ldmatrix4(own, tiles + (lane % 16) * 16 + lane / 16 * 8);
    ldmatrix4_transposed(columns, tiles + 256 + (lane % 16) * 16 + lane / 16 * 8);
  } else {
    for (int i = 0; i < 4; ++i) {
      const T* from = tiles + (group + i % 2 * 8) * 16 + pair + i / 2 * 8;
      own[i] = from[0].bits | static_cast<uint32_t>(from[1].bits) << 16;
      const T* column = tiles + 256 + (pair + i % 2 * 8) * 16 + group + i / 2 * 8;
      columns[i] = column[0].bits | static_cast<uint32_t>(column[16].bits) << 16;
    }
  }
  for (int n = 0; n < 2; ++n) {
    const uint32_t half[2] = {columns[2 * n], columns[2 * n + 1]};
    float sums[4] = {1, 1, 1, 1};
    mma<T>(sums, own, half);
    for (int i = 0; i < 4; ++i) c[(group + i / 2 * 8) * 16 + n * 8 + pair + i % 2] = sums[i];
  }
}

template <class T>
void multiplied(const void* a, const void* b, float* c, bool by_ldmatrix) {
  launch(multiply<T>, dim3(1), dim3(kWarp), 1024, nullptr, static_cast<const T*>(a), static_cast<const T*>(b), c,
         by_ldmatrix);
}

void nothing(int) {}

}  // namespace
}  // namespace quire::cuda

#define CHECK(kernel)                                                               \
  EXPORT const char* check_##kernel(float* out, const float* from, bool right) {   \
    return quire::cuda::caught(quire::cuda::kernel, out, from, right);             \
  }
CHECK(barrier)
CHECK(warp_barrier)
CHECK(wait)
CHECK(wait_for_younger)
CHECK(commit)
CHECK(reuse)
CHECK(divergence)
CHECK(half_a_warp)
CHECK(uninitialised)
CHECK(past_the_end)

EXPORT void check_mma(const void* a, const void* b, float* c, bool bfloat16, bool by_ldmatrix) {
  using namespace quire::cuda;
  (bfloat16 ? multiplied<bf16> : multiplied<f16>)(a, b, c, by_ldmatrix);
}

// Whether a launch of this size is taken.
EXPORT bool check_launch(unsigned rows, unsigned threads, unsigned shared) {
  try {
    quire::cuda::launch(quire::cuda::nothing, dim3(1, rows), dim3(threads), shared, nullptr, 0);
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

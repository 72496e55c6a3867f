// What the CUDA kernels are written in: the types, the instructions that have no name in CUDA C++, and `launch`.
//
// With QUIRE_CUDA_EMULATION, everything here comes from emulator.h instead, and the kernels are compiled for the host:
// so their indexing, their synchronisation and their arithmetic are tested on machines without a GPU.
//
// Kernels are compiled without contraction of products and sums (--fmad=false; fmaf where one is wanted): two kernels
// that must make the same bits from the same source do.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#include "arguments.h"

#ifdef QUIRE_CUDA_EMULATION
#include "cuda/emulator/emulator.h"
#else
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#endif

namespace quire::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Bits of a half type; arithmetic is done in float.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#ifndef QUIRE_CUDA_EMULATION

using Stream = cudaStream_t;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float x) {
  T y;
  if constexpr (sizeof(T) == 4) {
    y = x;
  } else if constexpr (__is_same(T, bf16)) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  } else {
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  }
  return y;
}

// Two values of T in a register, `low` in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack2(float low, float high) {
  uint32_t y;
  if constexpr (__is_same(T, bf16)) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  }
  return y;
}

// 2^x, to 2 ulp; -inf gives 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// c += a b for a [16, 16] row by row and b [16, 8] column by column (PTX ISA, mma.m16n8k16). Of lane l, with
// g = l / 4 and t = l % 4:
// a[0] = A[g][2t, 2t+1], a[1] = A[g+8][2t..], a[2] = A[g][2t+8..], a[3] = A[g+8][2t+8..]; b[0] = B[2t, 2t+1][g],
// b[1] = B[2t+8..][g]; c[0], c[1] = C[g][2t, 2t+1]; c[2], c[3] = C[g+8][2t, 2t+1].
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (__is_same(T, bf16)) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8x8 matrices of 2-byte elements from shared memory. Lane l gives the address of row l % 8 of matrix l / 8 (16
// bytes, aligned) and gets of matrix i, in out[i], the elements [l / 4][2 (l % 4), + 1]; transposed,
// [2 (l % 4), + 1][l / 4].
__device__ __forceinline__ void ldmatrix4(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix4_transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copies 16 bytes to shared memory behind the program's back, or writes zeros where not `valid` (`from` is not read
// then). Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async16(void* shared, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
// Closes a group of this thread's copies.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kGroups of this thread's groups are under way. Other threads' copies need __syncthreads besides.
template <int kGroups>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// 16 bytes of memory that nobody writes while the kernel runs, past the first-level cache where it can be.
__device__ __forceinline__ uint4 load_once16(const void* from) {
  uint4 y;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(y.x), "=r"(y.y), "=r"(y.z), "=r"(y.w)
               : "l"(from));
  return y;
}

// The launch's dynamic shared memory, aligned to 128 bytes.
__device__ __forceinline__ char* dynamic_shared() {
  extern __shared__ __align__(128) char quire_dynamic_shared[];
  return quire_dynamic_shared;
}

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Starts a kernel with `shared` bytes of dynamic shared memory; a grid without blocks is no launch. Throws
// std::runtime_error with CUDA's own words.
template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, Stream stream,
            const Arguments&... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  if (shared > 48 * 1024)
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
          "shared memory of a kernel");
  kernel<<<grid, block, shared, stream>>>(static_cast<Parameters>(arguments)...);
  check(cudaGetLastError(), "launch of a kernel");
}

#endif  // QUIRE_CUDA_EMULATION

// -- on both ---------------------------------------------------------------------------------------------------------

__host__ __device__ constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The sum or the largest of a warp's values, in every lane; the order of additions is a fixed tree.
__device__ __forceinline__ float warp_sum(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Calls function(T{}) for the type that `dtype` names.
template <class Function>
void for_dtype(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::float32: return function(float{});
    case DType::bfloat16: return function(bf16{});
    case DType::float16: return function(f16{});
  }
}

}  // namespace quire::cuda

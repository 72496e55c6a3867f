#include "cuda/common/device.h"
#include "cuda/common/kernels.h"

namespace quire::cuda {

#ifdef QUIRE_CUDA_EMULATION

void check_device() {}

#else

namespace {
__global__ void nothing() {}
}  // namespace

void check_device() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, nothing), "there is no program for it");
  int device = 0, most = 0;
  check(cudaGetDevice(&device), "the current device");
  check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "its shared memory");
  // Attention with heads of 256 takes the most. GPUs for desktops have some 99 KB.
  if (most < kMostShared)
    throw std::runtime_error("it has " + std::to_string(most / 1024) + " KB of shared memory for a block, and " +
                             std::to_string(kMostShared / 1024) +
                             " are needed: A100, H100, H200 or newer ones like them");
}

#endif

}  // namespace quire::cuda

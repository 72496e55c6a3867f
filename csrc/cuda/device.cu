#include "device.h"

#include "kernels.h"

namespace quire::cuda {

#ifdef QUIRE_CUDA_EMULATION

void check_device() {}

#else

namespace {
__global__ void nothing() {}
}  // namespace

void check_device() {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, nothing), "these kernels on this GPU");
}

#endif

}  // namespace quire::cuda

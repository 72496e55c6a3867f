// RMSNorm and LayerNorm: one block of threads a row.
//
// Each thread sums channels t, t + 256, ... (in vectors of 16 bytes where rows allow it), then a fixed tree adds the
// threads: a row's bits depend on its width alone.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;

// The sum over all threads, in each of them.
__device__ float block_sum(float x) {
  __shared__ float parts[kThreads / kWarp];
  x = warp_sum(x);
  __syncthreads();  // the parts of the sum before may still be read
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
  __syncthreads();
  float total = 0;
  for (float part : parts) total += part;
  return total;
}

struct Row {
  const void* x;
  void* residual;  // or null
  const void* weight;
  const void* bias;
  void* y;
  int64_t channels, x_stride;
  float eps;
};

// kCentred: LayerNorm. kStep: channels that a thread takes at a time.
template <class T, int kStep, bool kCentred>
__global__ void __launch_bounds__(kThreads) norm_kernel(Row args) {
  const int64_t row = blockIdx.x, channels = args.channels;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* residual = args.residual ? static_cast<T*>(args.residual) + row * channels : nullptr;
  T* y = static_cast<T*>(args.y) + row * channels;
  const T* source = residual ? residual : x;

  float sum = 0;
  for (int64_t c = threadIdx.x * kStep; c < channels; c += kThreads * kStep) {
    float values[kStep];
    load<kStep>(values, x + c);
    if (residual) {
      float more[kStep];
      load<kStep>(more, residual + c);
      for (int i = 0; i < kStep; ++i) values[i] = to_float(from_float<T>(more[i] + values[i]));
      store<kStep>(residual + c, values);
    }
    for (int i = 0; i < kStep; ++i) sum += kCentred ? values[i] : values[i] * values[i];
  }
  const float mean = block_sum(sum) / static_cast<float>(channels);

  // A thread reads back what it has itself written.
  float scale = mean;
  if (kCentred) {
    float squares = 0;
    for (int64_t c = threadIdx.x * kStep; c < channels; c += kThreads * kStep) {
      float values[kStep];
      load<kStep>(values, source + c);
      for (int i = 0; i < kStep; ++i) squares += (values[i] - mean) * (values[i] - mean);
    }
    scale = block_sum(squares) / static_cast<float>(channels);
  }
  scale = 1.0f / sqrtf(scale + args.eps);

  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  for (int64_t c = threadIdx.x * kStep; c < channels; c += kThreads * kStep) {
    float values[kStep], factors[kStep];
    load<kStep>(values, source + c);
    for (int i = 0; i < kStep; ++i) values[i] = (kCentred ? values[i] - mean : values[i]) * scale;
    if (weight) {
      load<kStep>(factors, weight + c);
      for (int i = 0; i < kStep; ++i) values[i] *= factors[i];
    }
    if (bias) {
      load<kStep>(factors, bias + c);
      for (int i = 0; i < kStep; ++i) values[i] += factors[i];
    }
    store<kStep>(y + c, values);
  }
}

template <bool kCentred>
void norm(const NormArgs& args, Stream stream) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const Row row{args.x, args.residual, args.weight, args.bias, args.y, args.channels, args.x_stride, args.eps};
    const bool wide = args.channels % kStep == 0 && args.x_stride % kStep == 0 &&
                      are_aligned(args.x, args.residual, args.weight, args.bias, args.y);
    launch(wide ? norm_kernel<T, kStep, kCentred> : norm_kernel<T, 1, kCentred>,
           dim3(static_cast<unsigned>(args.tokens)), dim3(kThreads), 0, stream, row);
  });
}

}  // namespace

void rms_norm(const NormArgs& args, Stream stream) { norm<false>(args, stream); }
void layer_norm(const NormArgs& args, Stream stream) { norm<true>(args, stream); }

}  // namespace quire::cuda

// RMSNorm and LayerNorm of rows or heads: a block of threads for each, or a warp where they are short.
//
// Each thread sums runs of 16 bytes t, t + its threads, ..., then a fixed tree adds the threads: a row's bits depend on
// its width alone, and not on whether runs can be read at once.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;  // of a block

// The sum over a row's threads, in each of them.
template <int kRowThreads>
__device__ __forceinline__ float row_sum(float x) {
  x = warp_sum(x);
  if constexpr (kRowThreads == kWarp) {
    return x;
  } else {
    __shared__ float parts[kRowThreads / kWarp];
    __syncthreads();  // the parts of the sum before may still be read
    if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = x;
    __syncthreads();
    float total = 0;
    for (float part : parts) total += part;
    return total;
  }
}

// A run of elements from c on; those past `end` are none. kWide: all are there, and can be read at once.
template <bool kWide, int kRun, class T>
__device__ __forceinline__ void load_run(float (&values)[kRun], const T* row, int64_t c, int64_t end) {
  if constexpr (kWide) {
    load<kRun>(values, row + c);
  } else {
    for (int i = 0; i < kRun; ++i) values[i] = c + i < end ? to_float(row[c + i]) : 0.0f;
  }
}
template <bool kWide, int kRun, class T>
__device__ __forceinline__ void store_run(T* row, const float (&values)[kRun], int64_t c, int64_t end) {
  if constexpr (kWide) {
    store<kRun>(row + c, values);
  } else {
    for (int i = 0; i < kRun && c + i < end; ++i) row[c + i] = from_float<T>(values[i]);
  }
}

// (x - shift) * scale * (weight + offset) + bias. Without an offset nothing is added: it would make a 0 of -0.
template <class T, bool kWide, int kRowThreads>
__device__ __forceinline__ void write_row(const NormArgs& args, int64_t head, const T* x, float shift, float scale,
                                          T* y) {
  constexpr int kRun = 16 / sizeof(T);
  const int64_t channels = args.channels, own = head * args.weight_stride;
  const T* weight = args.weight ? static_cast<const T*>(args.weight) + own : nullptr;
  const T* bias = args.bias ? static_cast<const T*>(args.bias) + own : nullptr;
  for (int64_t c = threadIdx.x % kRowThreads * kRun; c < channels; c += kRowThreads * kRun) {
    float values[kRun], factors[kRun];
    load_run<kWide>(values, x, c, channels);
    for (int i = 0; i < kRun; ++i) values[i] = (values[i] - shift) * scale;
    if (weight) {
      load_run<kWide>(factors, weight, c, channels);
      if (args.weight_offset != 0)
        for (int i = 0; i < kRun; ++i) factors[i] += args.weight_offset;
      for (int i = 0; i < kRun; ++i) values[i] *= factors[i];
    }
    if (bias) {
      load_run<kWide>(factors, bias, c, channels);
      for (int i = 0; i < kRun; ++i) values[i] += factors[i];
    }
    store_run<kWide>(y, values, c, channels);
  }
}

// kCentred: LayerNorm. kRowThreads: that share a row.
template <class T, bool kWide, bool kCentred, int kRowThreads>
__global__ void __launch_bounds__(kThreads, 4) norm_kernel(NormArgs args) {
  constexpr int kRun = 16 / sizeof(T);
  const int64_t channels = args.channels;
  const unsigned row = blockIdx.x * (kThreads / kRowThreads) + threadIdx.x / kRowThreads;
  const unsigned heads = static_cast<unsigned>(args.heads), token = row / heads, head = row % heads;
  if (token >= args.tokens) return;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride + head * channels;
  T* residual = args.residual ? static_cast<T*>(args.residual) + row * channels : nullptr;
  const T* source = residual ? residual : x;
  const int64_t first = threadIdx.x % kRowThreads * kRun;

  float sum = 0;
  for (int64_t c = first; c < channels; c += kRowThreads * kRun) {
    float values[kRun];
    load_run<kWide>(values, x, c, channels);
    if (residual) {
      float more[kRun];
      load_run<kWide>(more, residual, c, channels);
      for (int i = 0; i < kRun; ++i) values[i] = to_float(from_float<T>(more[i] + values[i] * args.x_scale));
      store_run<kWide>(residual, values, c, channels);
    }
    for (int i = 0; i < kRun; ++i) sum += kCentred ? values[i] : values[i] * values[i];
  }
  const float mean = row_sum<kRowThreads>(sum) / static_cast<float>(channels);

  // A thread reads back what it has itself written.
  float scale = mean;
  if (kCentred) {
    float squares = 0;
    for (int64_t c = first; c < channels; c += kRowThreads * kRun) {
      float values[kRun];
      load_run<kWide>(values, source, c, channels);
      for (int i = 0; i < kRun; ++i)
        if (kWide || c + i < channels) squares += (values[i] - mean) * (values[i] - mean);
    }
    scale = row_sum<kRowThreads>(squares) / static_cast<float>(channels);
  }
  scale = 1.0f / sqrtf(scale + args.eps);
  write_row<T, kWide, kRowThreads>(args, head, source, kCentred ? mean : 0.0f, scale,
                                   static_cast<T*>(args.y) + row * channels);
}

template <bool kCentred>
void norm(const NormArgs& args, Stream stream) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kRun = 16 / sizeof(T);
    const bool wide = args.channels % kRun == 0 && args.x_stride % kRun == 0 &&
                      are_aligned(args.x, args.residual, args.weight, args.bias, args.y);
    const auto start = [&](auto kernel, int row_threads) {
      const int64_t blocks = divide_up(args.tokens * args.heads, kThreads / row_threads);
      launch(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0, stream, args);
    };
    // A block's other warps would add zeros: the bits are the same.
    if (args.channels <= kWarp * kRun) {
      start(wide ? norm_kernel<T, true, kCentred, kWarp> : norm_kernel<T, false, kCentred, kWarp>, kWarp);
    } else {
      start(wide ? norm_kernel<T, true, kCentred, kThreads> : norm_kernel<T, false, kCentred, kThreads>, kThreads);
    }
  });
}

}  // namespace

void rms_norm(const NormArgs& args, Stream stream) { norm<false>(args, stream); }
void layer_norm(const NormArgs& args, Stream stream) { norm<true>(args, stream); }

}  // namespace quire::cuda

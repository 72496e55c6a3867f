// Activations of feed-forward layers, alone or times a second half (the gated form). Every element is made on its own.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostColumns = 65535;  // of a grid, in blocks

__device__ __forceinline__ float times_sigmoid(float x, float argument) { return x / (1.0f + expf(-argument)); }

// Without the difference of numbers near 1 that the forms with erf and tanh have for x < 0.
__device__ __forceinline__ float activated(Activation kind, float x) {
  const float positive = x < 0 ? 0.0f : x;  // a NaN stays one
  switch (kind) {
    case Activation::silu: return times_sigmoid(x, x);
    case Activation::relu: return positive;
    case Activation::gelu: return 0.5f * x * erfcf(x * -0.70710678f);
    // x (1 + tanh(u)) / 2 is x sigmoid(2 u).
    case Activation::gelu_tanh: return times_sigmoid(x, 1.5957691216f * fmaf(x * x * x, 0.044715f, x));
    case Activation::quick_gelu: return times_sigmoid(x, 1.702f * x);
    case Activation::relu2: return positive * positive;
    case Activation::relu6: return positive > 6 ? 6.0f : positive;
    case Activation::sigmoid: return times_sigmoid(1.0f, x);
    case Activation::tanh: return tanhf(x);
    case Activation::mish: {
      // x tanh(ln(1 + e)), of e = e^x, is x s / (s + 2) with s = e (e + 2). Above 20 that is x.
      const float e = expf(fminf(x, 20.0f)), s = e * (e + 2.0f);
      return x * (s / (s + 2.0f));
    }
  }
  return x;
}

// The kinds that few models have share a kernel, which looks at each call's.
constexpr int kOfCall = -1;

// kStep: channels that a thread takes at a time.
template <class T, int kStep, int kKind>
__global__ void __launch_bounds__(kThreads) activation_kernel(ActivationArgs args) {
  const int64_t token = blockIdx.x, channels = args.channels;
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  T* y = static_cast<T*>(args.y) + token * channels;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kStep;
  for (int64_t c = first; c < channels; c += static_cast<int64_t>(gridDim.y) * kThreads * kStep) {
    float values[kStep];
    load<kStep>(values, x + c);
    for (int i = 0; i < kStep; ++i)
      values[i] = activated(kKind == kOfCall ? args.kind : static_cast<Activation>(kKind), values[i]);
    if (args.gated) {
      float factors[kStep];
      load<kStep>(factors, x + channels + c);
      for (int i = 0; i < kStep; ++i) values[i] *= factors[i];
    }
    store<kStep>(y + c, values);
  }
}

template <class T, int kStep>
void start(const ActivationArgs& args, Stream stream) {
  const int64_t columns = divide_up(args.channels, kThreads * kStep);
  const dim3 grid(static_cast<unsigned>(args.tokens),
                  static_cast<unsigned>(columns < kMostColumns ? columns : kMostColumns));
  void (*kernel)(ActivationArgs) = activation_kernel<T, kStep, kOfCall>;
  switch (args.kind) {
    case Activation::silu: kernel = activation_kernel<T, kStep, static_cast<int>(Activation::silu)>; break;
    case Activation::gelu: kernel = activation_kernel<T, kStep, static_cast<int>(Activation::gelu)>; break;
    case Activation::gelu_tanh: kernel = activation_kernel<T, kStep, static_cast<int>(Activation::gelu_tanh)>; break;
    default: break;
  }
  launch(kernel, grid, dim3(kThreads), 0, stream, args);
}

}  // namespace

void activation(const ActivationArgs& args, Stream stream) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool wide = args.channels % kStep == 0 && args.x_stride % kStep == 0 && are_aligned(args.x, args.y);
    (wide ? start<T, kStep> : start<T, 1>)(args, stream);
  });
}

}  // namespace quire::cuda

// What is made of each element, or pair of them, on its own: gpt-oss's clamped SwiGLU, xIELU, sums and multiples.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostColumns = 65535;  // of a grid, in blocks

// make(values, token, c): the elements c, ... of y's row.
template <class T>
struct ClampedSwiglu {
  ClampedSwigluArgs args;

  template <int kStep>
  __device__ __forceinline__ void make(float (&values)[kStep], int64_t token, int64_t c) const {
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
    float pairs[2][kStep];
    load<kStep>(pairs[0], args.interleaved ? x + 2 * c : x + c);
    load<kStep>(pairs[1], args.interleaved ? x + 2 * c + kStep : x + args.channels + c);
    for (int i = 0; i < kStep; ++i) {
      float gate = pairs[0][i], up = pairs[1][i];
      if (args.interleaved)
        gate = pairs[2 * i / kStep][2 * i % kStep], up = pairs[(2 * i + 1) / kStep][(2 * i + 1) % kStep];
      gate = gate > args.limit ? args.limit : gate;  // a NaN stays one
      up = up > args.limit ? args.limit : up < -args.limit ? -args.limit : up;
      values[i] = (up + 1.0f) * (gate / (1.0f + expf(-args.alpha * gate)));
    }
  }
};

__device__ __forceinline__ float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

template <class T>
struct Xielu {
  XieluArgs args;

  template <int kStep>
  __device__ __forceinline__ void make(float (&values)[kStep], int64_t token, int64_t c) const {
    const float beta = *args.beta, eps = *args.eps;
    const float positive = softplus(to_float(*static_cast<const T*>(args.alpha_p)));
    const float negative = beta + softplus(to_float(*static_cast<const T*>(args.alpha_n)));
    load<kStep>(values, static_cast<const T*>(args.x) + token * args.x_stride + c);
    for (int i = 0; i < kStep; ++i) {
      const float x = values[i];
      values[i] = (x > 0 ? positive * x * x : (expm1f(fminf(x, eps)) - x) * negative) + beta * x;
    }
  }
};

template <class T>
struct Add {
  AddArgs args;

  template <int kStep>
  __device__ __forceinline__ void make(float (&values)[kStep], int64_t token, int64_t c) const {
    float added[kStep];
    load<kStep>(values, static_cast<const T*>(args.x) + token * args.x_stride + c);
    load<kStep>(added, static_cast<const T*>(args.added) + token * args.added_stride + c);
    for (int i = 0; i < kStep; ++i) values[i] += added[i] * args.scale;
  }
};

template <class T>
struct Scale {
  ScaleArgs args;

  template <int kStep>
  __device__ __forceinline__ void make(float (&values)[kStep], int64_t token, int64_t c) const {
    load<kStep>(values, static_cast<const T*>(args.x) + token * args.x_stride + c);
    const float factor = args.rows ? args.factor * args.rows[token] : args.factor, limit = args.limit;
    for (int i = 0; i < kStep; ++i) {
      values[i] *= factor;
      if (args.cap != 0) values[i] = tanhf(values[i] / args.cap) * args.cap;
      if (limit != 0) values[i] = values[i] > limit ? limit : values[i] < -limit ? -limit : values[i];
    }
  }
};

// kStep: channels that a thread takes at a time.
template <class T, int kStep, class Operation>
__global__ void __launch_bounds__(kThreads) elements_kernel(Operation operation) {
  const int64_t token = blockIdx.x, channels = operation.args.channels;
  T* y = static_cast<T*>(operation.args.y) + token * channels;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kStep;
  for (int64_t c = first; c < channels; c += static_cast<int64_t>(gridDim.y) * kThreads * kStep) {
    float values[kStep];
    operation.make(values, token, c);
    store<kStep>(y + c, values);
  }
}

// `wide(step)`: whether rows can be read `step` elements at a time.
template <template <class> class Operation, class Args, class Wide>
void start(const Args& args, Stream stream, const Wide& wide) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool steps =
        args.channels % kStep == 0 && args.x_stride % kStep == 0 && are_aligned(args.x, args.y) && wide(int64_t{kStep});
    const int64_t columns = divide_up(args.channels, kThreads * (steps ? kStep : 1));
    const dim3 grid(static_cast<unsigned>(args.tokens),
                    static_cast<unsigned>(columns < kMostColumns ? columns : kMostColumns));
    launch(steps ? elements_kernel<T, kStep, Operation<T>> : elements_kernel<T, 1, Operation<T>>, grid, dim3(kThreads),
           0, stream, Operation<T>{args});
  });
}

bool always(int64_t) { return true; }

}  // namespace

void clamped_swiglu(const ClampedSwigluArgs& args, Stream stream) { start<ClampedSwiglu>(args, stream, always); }
void xielu(const XieluArgs& args, Stream stream) { start<Xielu>(args, stream, always); }
void add(const AddArgs& args, Stream stream) {
  start<Add>(args, stream, [&](int64_t step) { return args.added_stride % step == 0 && are_aligned(args.added); });
}
void scale(const ScaleArgs& args, Stream stream) { start<Scale>(args, stream, always); }

}  // namespace quire::cuda

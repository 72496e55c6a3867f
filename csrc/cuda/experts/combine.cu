// Each token's rows times their weights, added up in their order: a block of threads for a token's channels.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostColumns = 65535;  // of a grid, in blocks

// kStep: channels that a thread takes at a time.
template <class T, int kStep>
__global__ void __launch_bounds__(kThreads) combine_kernel(const CombineArgs args, int64_t rows) {
  const int64_t token = blockIdx.x, channels = args.channels;
  const int32_t* places = args.places + token * args.chosen;
  const float* weights = args.weights + token * args.chosen;
  const T* x = static_cast<const T*>(args.x);
  const T* shared = args.shared ? static_cast<const T*>(args.shared) + token * args.shared_stride : nullptr;
  const float gate = args.shared_gate ? 1.0f / (1.0f + expf(-args.shared_gate[token])) : 1.0f;
  T* y = static_cast<T*>(args.y) + token * channels;
  const int64_t first = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * kStep;
  for (int64_t c = first; c < channels; c += static_cast<int64_t>(gridDim.y) * kThreads * kStep) {
    float sum[kStep] = {}, values[kStep];
    for (int64_t j = 0; j < args.chosen; ++j) {
      const int64_t place = places[j];
      if (place < 0 || place >= rows) continue;
      load<kStep>(values, x + place * args.x_stride + c);
      for (int i = 0; i < kStep; ++i) sum[i] = fmaf(weights[j], values[i], sum[i]);
    }
    if (shared) {
      load<kStep>(values, shared + c);
      for (int i = 0; i < kStep; ++i) sum[i] += gate * values[i];
    }
    store<kStep>(y + c, sum);
  }
}

}  // namespace

void combine(const CombineArgs& args, int64_t rows, Stream stream) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool wide = args.channels % kStep == 0 && args.x_stride % kStep == 0 && args.shared_stride % kStep == 0 &&
                      are_aligned(args.x, args.shared, args.y);
    const int64_t columns = divide_up(args.channels, kThreads * (wide ? kStep : 1));
    const dim3 grid(static_cast<unsigned>(args.tokens),
                    static_cast<unsigned>(columns < kMostColumns ? columns : kMostColumns));
    launch(wide ? combine_kernel<T, kStep> : combine_kernel<T, 1>, grid, dim3(kThreads), 0, stream, args, rows);
  });
}

}  // namespace quire::cuda

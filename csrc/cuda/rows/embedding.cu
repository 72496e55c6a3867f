// Rows of a table, times a number, plus another row where one is given: one block of threads a token.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;

// kStep: channels that a thread takes at a time.
template <class T, int kStep>
__global__ void __launch_bounds__(kThreads) embedding_kernel(EmbeddingArgs args) {
  const int64_t token = blockIdx.x, channels = args.channels, id = args.ids[token];
  const bool known = id >= 0 && id < args.table_rows;
  const T* row = static_cast<const T*>(args.table) + (known ? id : 0) * channels;
  const T* added = args.added ? static_cast<const T*>(args.added) + token * channels : nullptr;
  T* y = static_cast<T*>(args.y) + token * channels;
  for (int64_t c = threadIdx.x * kStep; c < channels; c += kThreads * kStep) {
    float values[kStep] = {};
    if (known) load<kStep>(values, row + c);
    for (int i = 0; i < kStep; ++i) values[i] *= args.scale;
    if (added) {
      float more[kStep];
      load<kStep>(more, added + c);
      for (int i = 0; i < kStep; ++i) values[i] += more[i];
    }
    store<kStep>(y + c, values);
  }
}

}  // namespace

void embedding(const EmbeddingArgs& args, Stream stream) {
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool wide = args.channels % kStep == 0 && are_aligned(args.table, args.added, args.y);
    launch(wide ? embedding_kernel<T, kStep> : embedding_kernel<T, 1>, dim3(static_cast<unsigned>(args.tokens)),
           dim3(kThreads), 0, stream, args);
  });
}

}  // namespace quire::cuda

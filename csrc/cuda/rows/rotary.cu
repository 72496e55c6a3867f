// Rotary position embedding of queries and keys, in place: one block of threads a token.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;

template <int kCount>
__device__ __forceinline__ void load_floats(float (&values)[kCount], const float* from) {
  if constexpr (kCount == 1) {
    values[0] = *from;
  } else {
    for (int i = 0; i < kCount; i += 4) {
      float some[4];
      load<4>(some, from + i);
      for (int j = 0; j < 4; ++j) values[i + j] = some[j];
    }
  }
}

// (a, b) becomes (a cos - b sin, b cos + a sin) for a and b half a rotary width apart, or, interleaved, side by side.
// kStep: pairs that a thread takes at a time.
template <class T, int kStep, bool kInterleaved>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryArgs args) {
  const int64_t token = blockIdx.x, position = args.positions[token];
  if (position < 0 || position >= args.rows) return;
  const int half = static_cast<int>(args.rotary_dim / 2), steps = half / kStep;
  const int heads = static_cast<int>(args.heads), items = (heads + static_cast<int>(args.kv_heads)) * steps;
  const float* cos = args.cos_sin + position * args.rotary_dim;
  T* query = static_cast<T*>(args.query) + token * args.query_stride + args.first;
  T* key = static_cast<T*>(args.key) + token * args.key_stride + args.first;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kThreads) {
    const int head = item / steps, c = item % steps * kStep;
    T* row = head < heads ? query + head * args.head_dim : key + (head - heads) * args.head_dim;
    T* first = row + (kInterleaved ? 2 * c : c);
    T* second = first + (kInterleaved ? kStep : half);
    float values[2][kStep], cosines[kStep], sines[kStep];
    load<kStep>(values[0], first);
    load<kStep>(values[1], second);
    load_floats<kStep>(cosines, cos + c);
    load_floats<kStep>(sines, cos + half + c);
    for (int i = 0; i < kStep; ++i) {
      float& a = kInterleaved ? values[2 * i / kStep][2 * i % kStep] : values[0][i];
      float& b = kInterleaved ? values[(2 * i + 1) / kStep][(2 * i + 1) % kStep] : values[1][i];
      const float x = a, y = b;
      a = x * cosines[i] - y * sines[i];
      b = y * cosines[i] + x * sines[i];
    }
    store<kStep>(first, values[0]);
    store<kStep>(second, values[1]);
  }
}

}  // namespace

void rotary(const RotaryArgs& args, Stream stream) {
  if (args.rotary_dim < 2) return;
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool wide = args.rotary_dim % (2 * kStep) == 0 && args.head_dim % kStep == 0 && args.first % kStep == 0 &&
                      args.query_stride % kStep == 0 && args.key_stride % kStep == 0 &&
                      are_aligned(args.query, args.key, args.cos_sin);
    const auto start = [&](auto kernel) {
      launch(kernel, dim3(static_cast<unsigned>(args.tokens)), dim3(kThreads), 0, stream, args);
    };
    if (args.interleaved) {
      start(wide ? rotary_kernel<T, kStep, true> : rotary_kernel<T, 1, true>);
    } else {
      start(wide ? rotary_kernel<T, kStep, false> : rotary_kernel<T, 1, false>);
    }
  });
}

}  // namespace quire::cuda

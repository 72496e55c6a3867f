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

// (a, b) becomes (a cos - b sin, b cos + a sin) for a and b half a rotary width apart. kStep: pairs that a thread takes
// at a time.
template <class T, int kStep>
__global__ void __launch_bounds__(kThreads) rotary_kernel(RotaryArgs args) {
  const int64_t token = blockIdx.x, position = args.positions[token];
  if (position < 0 || position >= args.rows) return;
  const int half = static_cast<int>(args.rotary_dim / 2), steps = half / kStep;
  const int heads = static_cast<int>(args.heads), items = (heads + static_cast<int>(args.kv_heads)) * steps;
  const float* cos = args.cos_sin + position * args.rotary_dim;
  T* query = static_cast<T*>(args.query) + token * args.query_stride;
  T* key = static_cast<T*>(args.key) + token * args.key_stride;
  for (int item = static_cast<int>(threadIdx.x); item < items; item += kThreads) {
    const int head = item / steps, c = item % steps * kStep;
    T* first = (head < heads ? query + head * args.head_dim : key + (head - heads) * args.head_dim) + c;
    T* second = first + half;
    float a[kStep], b[kStep], cosines[kStep], sines[kStep];
    load<kStep>(a, first);
    load<kStep>(b, second);
    load_floats<kStep>(cosines, cos + c);
    load_floats<kStep>(sines, cos + half + c);
    for (int i = 0; i < kStep; ++i) {
      const float x = a[i], y = b[i];
      a[i] = x * cosines[i] - y * sines[i];
      b[i] = y * cosines[i] + x * sines[i];
    }
    store<kStep>(first, a);
    store<kStep>(second, b);
  }
}

}  // namespace

void rotary(const RotaryArgs& args, Stream stream) {
  if (args.rotary_dim < 2) return;
  for_dtype(args.dtype, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kStep = 16 / sizeof(T);
    const bool wide = args.rotary_dim % (2 * kStep) == 0 && args.head_dim % kStep == 0 &&
                      args.query_stride % kStep == 0 && args.key_stride % kStep == 0 &&
                      are_aligned(args.query, args.key, args.cos_sin);
    launch(wide ? rotary_kernel<T, kStep> : rotary_kernel<T, 1>, dim3(static_cast<unsigned>(args.tokens)),
           dim3(kThreads), 0, stream, args);
  });
}

}  // namespace quire::cuda

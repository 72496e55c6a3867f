// Each channel's convolution with its own past, then SiLU. A number's bits depend on its own inputs alone.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"
#include "cpu/states/past.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kColumns = 64;  // channels that a thread takes at a time
constexpr int64_t kMostTaps = 16;

// Channels c .. c + n of a row that holds input i of the sequence, counted from the step's first: a row of x, or of
// the tail that the step before has left; null: there was nothing.
template <class T>
inline const T* input(const CausalConvArgs& args, const Rows& rows, const T* tail, int64_t i) {
  if (i >= 0) return static_cast<const T*>(args.x) + (rows.first + i) * args.x_stride;
  return tail ? tail + (args.kernel - 1 + i) * args.channels : nullptr;
}

template <class T>
void convolve(const CausalConvArgs& args, int64_t first, int64_t columns) {
  const int64_t taps = args.kernel, channels = args.channels, tail_size = (taps - 1) * channels;
  alignas(64) float weight[kMostTaps][kColumns] = {};
  for (int64_t c = 0; c < columns; ++c)
    for (int64_t k = 0; k < taps; ++k) {
      float w[1];
      const T* at = static_cast<const T*>(args.weight) + (first + c) * taps + k;
      store_first(w, load_first(at, 1), 1);
      weight[k][c] = args.scales ? w[0] * args.scales[first + c] : w[0];
    }
  T* tails = static_cast<T*>(args.tails);
  for (int64_t s = 0; s < args.past.sequences; ++s) {
    const Rows rows = rows_of(args.past, s);
    if (rows.first == rows.end) continue;
    const int64_t before = state_before(args.past, s, rows.position);
    const T* tail = before < 0 ? nullptr : tails + before * tail_size;
    for (int64_t c = 0; c < columns; c += kLanes) {
      const int n = static_cast<int>(columns - c < kLanes ? columns - c : kLanes);
      const Vec bias = args.bias ? load_first(static_cast<const T*>(args.bias) + first + c, n) : zero();
      for (int64_t t = 0; t < rows.end - rows.first; ++t) {
        Vec sum = zero();
        for (int64_t k = 0; k < taps; ++k) {
          const T* x = input(args, rows, tail, t - (taps - 1) + k);
          if (x) sum = fma(load_first(x + first + c, n), load(weight[k] + c), sum);
        }
        sum = add(sum, bias);
        T* y = static_cast<T*>(args.y) + (rows.first + t) * channels + first + c;
        store_first(y, mul(sum, sigmoid(sum)), n);
      }
    }
    each_run(args.past, s, [&](int64_t, int64_t end, int64_t, int64_t to) {
      for (int64_t k = 0; k < taps - 1; ++k) {
        const T* x = input(args, rows, tail, end - rows.first - (taps - 1) + k);
        T* kept = tails + to * tail_size + k * channels + first;
        if (x)
          __builtin_memcpy(kept, x + first, columns * sizeof(T));
        else
          __builtin_memset(kept, 0, columns * sizeof(T));
      }
    });
  }
}

template <class T>
void causal_conv_as(const CausalConvArgs& args) {
  const int64_t pieces = (args.channels + kColumns - 1) / kColumns;
  parallel_for(pieces, [&](int64_t piece) {
    const int64_t first = piece * kColumns, left = args.channels - first;
    convolve<T>(args, first, left < kColumns ? left : kColumns);
  });
  mark(args.past);
}

}  // namespace

void causal_conv(const CausalConvArgs& args) {
  switch (args.dtype) {
    case DType::float32: return causal_conv_as<float>(args);
    case DType::bfloat16: return causal_conv_as<bf16>(args);
    case DType::float16: return causal_conv_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

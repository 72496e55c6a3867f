// Attention in float32, which tensor cores do not have: a warp for each (token, head).
//
// Keys go by 32, a lane each, counted from position 0; then the lanes share the values' columns, a key after the other.
#include "cuda/attention/attention.h"

namespace quire::cuda {
namespace {

constexpr int kWarps = 4;

// The sequence of a token, or -1.
__device__ int sequence_of(const Attention& args, int token) {
  int low = 0, high = args.sequences;  // the last that begins at the token or before is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (args.query_start[middle] <= token ? low : high) = middle;
  }
  return args.query_start[low] <= token && token < args.query_start[low + 1] ? low : -1;
}

// kColumns: of the values, that a lane has.
template <int kColumns>
__global__ void __launch_bounds__(kWarps * kWarp, 4) float_kernel(Attention args) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (item >= static_cast<int64_t>(args.tokens) * args.heads) return;
  const int token = static_cast<int>(item / args.heads), head = static_cast<int>(item % args.heads);
  const int sequence = sequence_of(args, token);
  if (sequence < 0) return;
  const int kv_head = head / args.group;
  const float* query =
      static_cast<const float*>(args.query) + token * args.query_stride + static_cast<int64_t>(head) * args.head_dim;
  const int32_t* table = args.block_table + sequence * args.table_stride;
  const float* all_keys = static_cast<const float*>(args.keys);
  const float* all_values = static_cast<const float*>(args.values);
  Shape shape(args, head);
  if (args.negative) shape.factor = -shape.factor;

  float largest = -INFINITY, sum = 0, values[kColumns] = {};
  const int context = context_of(args, sequence);
  const int position = context - (args.query_start[sequence + 1] - token);
  const int end = args.visible_end ? min(max(args.visible_end[token], position + 1), context) : position + 1;
  const int begin = first_visible(args, position);
  for (int base = begin / kWarp * kWarp; base < end && position >= 0; base += kWarp) {
    const int key = base + lane;
    const bool seen = key < end && key >= begin;
    const int64_t row = seen ? row_at(args, block_at(args, table, key), kv_head, key) : -1;
    float score = 0;
    if (row >= 0)
      for (int i = 0; i < args.head_dim; ++i) score = fmaf(query[i], all_keys[row * args.head_dim + i], score);
    score = seen ? shape.score(score, position - key, args.cap) : -INFINITY;

    const float best = fmaxf(largest, warp_max(score)), finite = finite_or_zero(best);
    const float old = weight_of(largest, finite, 1.0f), weight = weight_of(score, finite, 1.0f);
    largest = best;
    sum = sum * old + warp_sum(weight);
#pragma unroll
    for (int i = 0; i < kColumns; ++i) values[i] *= old;
    for (int k = 0; k < min(kWarp, end - base); ++k) {
      const float share = __shfl_sync(kAllLanes, weight, k);
      const int64_t from = __shfl_sync(kAllLanes, row, k);
      if (from < 0) continue;  // not seen, or nowhere
      const float* value = all_values + from * args.value_stride;
#pragma unroll
      for (int i = 0; i < kColumns; ++i)
        if (lane + i * kWarp < args.value_dim) values[i] = fmaf(share, value[lane + i * kWarp], values[i]);
    }
  }
  Total total;
  total.largest = largest, total.sum = sum;
  total.close(args, head, 1.0f);
  float* out = static_cast<float*>(args.out) + item * args.value_dim;
#pragma unroll
  for (int i = 0; i < kColumns; ++i)
    if (lane + i * kWarp < args.value_dim)
      out[lane + i * kWarp] = position < 0 ? 0.0f : finished(values[i] * total.old, total.sum);
}

}  // namespace

void attend_float(const Attention& args, Stream stream) {
  const int64_t items = static_cast<int64_t>(args.tokens) * args.heads;
  launch(args.value_dim <= kMostHeadDim ? float_kernel<kMostHeadDim / kWarp> : float_kernel<kMostValueDim / kWarp>,
         dim3(static_cast<unsigned>(divide_up(items, kWarps))), dim3(kWarps * kWarp), 0, stream, args);
}

}  // namespace quire::cuda

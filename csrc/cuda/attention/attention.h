// What the attention kernels share: their parameters, and where a key's row lies.
//
// A token's bits do not depend on its company, because there is one computation for each (token, head), which every
// kernel carries out. Keys are taken in tiles of 64 and spans of 512, both counted from position 0. Within a span, an
// online softmax (arXiv:1805.02867) goes over the tiles in order, from a fresh state; spans are then merged in order.
// All products are made by the same instruction in the same order, the sum of the weights too; the largest score is
// exact in any order. A tile or span of which a row sees nothing changes nothing of the row, visited or not.
// (Where values are infinite or NaN, this does not hold for tokens shortly before them: 0 * inf is NaN.)
#pragma once

#include "cuda/common/kernels.h"

namespace quire::cuda {

constexpr int kKeys = 64;  // in a tile
constexpr int kSpanTiles = 8;
constexpr int kSpan = kSpanTiles * kKeys;
constexpr int kMostHeadDim = 256;  // that attend_single and attend_many have registers for
// What attend_wide has shared memory for: latent attention's rows (arXiv:2405.04434).
constexpr int kMostKeyDim = 576;
constexpr int kMostValueDim = 512;
constexpr float kLog2e = 1.44269504f;

struct Attention {
  const void *query, *keys, *values;
  void* out;
  const int32_t *block_table, *query_start, *context_len, *visible_end;
  const float *slopes, *sinks, *head_scales;
  int64_t query_stride, table_stride, value_stride, num_blocks;
  int tokens, sequences, heads, kv_heads, group, head_dim, value_dim, block_size, table_width;
  int capacity;   // keys that a row of the table has room for
  int window;     // as AttentionArgs', but large where there is none
  int chunk;      // as AttentionArgs'
  float factor;   // |scale| log2(e): weights are powers of 2; with a soft cap |scale| / cap
  float cap;      // the soft cap times log2(e), or 0
  bool negative;  // of scale: the query is negated instead, so that the largest product is the largest score
  bool shaped;    // a score is more than its product times `factor`: see `Shape`
  bool wide;      // rows can be read and written 16 bytes at a time
};

void attend_single(const Attention& args, DType dtype, float* partial, Stream stream);       // sequences of one token
void attend_many(const Attention& args, DType dtype, Stream stream);                         // of more
void attend_wide_single(const Attention& args, DType dtype, float* partial, Stream stream);  // of heads above 256
void attend_wide_many(const Attention& args, DType dtype, Stream stream);
void attend_float(const Attention& args, Stream stream);  // all of them, in float32

// What becomes of the partial results of sequences of one token.
void merge_spans(const Attention& args, DType dtype, float* partial, Stream stream);

// Bytes of what is kept of the spans of sequences of one token; 0: no such room is needed.
int64_t partial_bytes(const Attention& args);

__host__ __device__ constexpr int partial_stride(int value_dim) { return (value_dim + 1) / 2 * 2; }

// Tiles of keys.
struct Range {
  int first, last;
};
// The first key that a row at a position sees; 0 below position 0, where there is none. It does not descend from one
// position to the next.
__device__ __forceinline__ int first_visible(const Attention& args, int position) {
  const int first = position < args.window ? 0 : position - args.window + 1;
  return args.chunk > 0 && position > 0 ? max(first, position - position % args.chunk) : first;
}
// What rows from position `low` on may see, of the keys up to `high`; both are >= 0.
__device__ __forceinline__ Range visible_tiles(const Attention& args, int low, int high) {
  return {first_visible(args, low) / kKeys, high / kKeys};
}

__device__ __forceinline__ int context_of(const Attention& args, int sequence) {
  return min(args.context_len[sequence], args.capacity);
}

// The block of the table that holds a position, or -1.
__device__ __forceinline__ int block_at(const Attention& args, const int32_t* table, int position) {
  const int place = position / args.block_size;
  const int block = place < args.table_width ? table[place] : -1;
  return block < args.num_blocks ? block : -1;
}

// Which row of keys and of values is a position's; -1: none, it reads as zeros.
__device__ __forceinline__ int64_t row_at(const Attention& args, int block, int kv_head, int position) {
  if (block < 0) return -1;
  const int64_t row = (static_cast<int64_t>(block) * args.kv_heads + kv_head) * args.block_size;
  return row + position % args.block_size;
}

// What makes a head's scores of its products: a factor of its own, the soft cap, ALiBi; times log2(e).
struct Shape {
  float factor, slope;

  Shape() = default;
  __device__ __forceinline__ Shape(const Attention& args, int head)
      : factor(args.head_scales ? args.factor * args.head_scales[head] : args.factor),
        slope(args.slopes ? args.slopes[head] * kLog2e : 0.0f) {}
  // distance: from the key to the query.
  __device__ __forceinline__ float score(float product, int distance, float cap) const {
    float x = product * factor;
    if (cap != 0) x = tanhf(x) * cap;
    return fmaf(-slope, static_cast<float>(distance), x);
  }
};

// -- the state of a row: largest score so far, sum of weights, weighted sum of values ---------------------------------

// 2^((x - largest) factor), where the largest may be -inf: then all are.
__device__ __forceinline__ float weight_of(float x, float finite, float factor) {
  return exp2_fast((x - finite) * factor);
}
__device__ __forceinline__ float finite_or_zero(float x) { return x == -INFINITY ? 0.0f : x; }

// What a row has of the spans so far. Merging into an empty total takes the span over exactly.
struct Total {
  float largest = -INFINITY, sum = 0;
  float old, added;  // factors for the values of the total and of the span

  __device__ __forceinline__ void merge(float span_largest, float span_sum, float factor) {
    const float both = fmaxf(largest, span_largest), finite = finite_or_zero(both);
    old = weight_of(largest, finite, factor);
    added = weight_of(span_largest, finite, factor);
    sum = fmaf(span_sum, added, sum * old);
    largest = both;
  }
  __device__ __forceinline__ float merged(float total, float span) const { return fmaf(span, added, total * old); }

  // Once all is merged: adds a head's sink, a score of its own without a value. Values are to be multiplied with `old`.
  __device__ __forceinline__ void close(const Attention& args, int head, float factor) {
    old = 1.0f;
    if (!args.sinks) return;
    const float sink = args.sinks[head] * kLog2e, scaled = largest * factor;
    const float finite = finite_or_zero(fmaxf(scaled, sink));
    old = weight_of(scaled, finite, 1.0f);
    sum = fmaf(sum, old, weight_of(sink, finite, 1.0f));
  }
};

// An element of the result. Adding 0 makes one zero of the two.
__device__ __forceinline__ float finished(float value, float sum) { return value * (1.0f / sum) + 0.0f; }

}  // namespace quire::cuda

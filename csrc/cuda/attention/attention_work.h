// How the work of attention is shared out: tiles of rows, spans of keys and their partial results.
#pragma once

#include "cuda/attention/attention.h"

namespace quire::cuda {

// -- rows: a sequence's tokens with, for each, the query heads that share a key head ----------------------------------

struct alignas(16) Row {
  int position, end;  // of the token, and behind the last key that it sees
  int token, head;    // of the step; token < 0: a row past a tile's last, which is not written
};

// Row number `row` of a sequence whose tokens are start, ...; `before`: its tokens of earlier steps.
__device__ __forceinline__ Row row_of(const Attention& args, int start, int before, int kv_head, int row) {
  const int token = start + row / args.group, position = before + row / args.group;
  const int end = args.visible_end ? max(args.visible_end[token], position + 1) : position + 1;
  return {position, end, token, kv_head * args.group + row % args.group};
}

template <class T>
__device__ __forceinline__ const T* query_of(const Attention& args, const Row& row) {
  if (row.token < 0) return nullptr;
  return static_cast<const T*>(args.query) + row.token * args.query_stride +
         static_cast<int64_t>(row.head) * args.head_dim;
}
template <class T>
__device__ __forceinline__ T* out_of(const Attention& args, const Row& row) {
  return static_cast<T*>(args.out) + (static_cast<int64_t>(row.token) * args.heads + row.head) * args.value_dim;
}

// -- sequences of several tokens: their rows go by tiles -------------------------------------------------------------

struct Place {
  int sequence, tile;  // sequence < 0: none
};

// Finds the tile of `rows` rows `index`, counted over all sequences of several tokens. All lanes call it.
__device__ inline Place find_tile(const Attention& args, int index, int rows) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int before = 0;
  for (int first = 0; first < args.sequences; first += kWarp) {
    const int sequence = first + lane;
    int tiles = 0;
    if (sequence < args.sequences) {
      const int tokens = args.query_start[sequence + 1] - args.query_start[sequence];
      if (tokens > 1) tiles = static_cast<int>(divide_up(static_cast<int64_t>(tokens) * args.group, rows));
    }
    int through = tiles;  // all lanes' up to this
    for (int step = 1; step < kWarp; step *= 2) {
      const int more = __shfl_up_sync(kAllLanes, through, static_cast<unsigned>(step));
      if (lane >= step) through += more;
    }
    const unsigned found = __ballot_sync(kAllLanes, index < before + through);
    if (found) {
      const int source = __ffs(static_cast<int>(found)) - 1;
      // Later tiles see more keys: they start first.
      return {first + source, before + __shfl_sync(kAllLanes, through, source) - 1 - index};
    }
    before += __shfl_sync(kAllLanes, through, kWarp - 1);
  }
  return {-1, 0};
}

// Tiles of rows there can be at most, whatever the sequences' shares of the tokens.
inline int64_t most_tiles(const Attention& args, int64_t rows) {
  const int64_t all = static_cast<int64_t>(args.tokens) * args.group;
  if (args.sequences == 1) return divide_up(all, rows);
  return all / rows + min(args.sequences, args.tokens / 2);
}

// -- sequences of one token: their keys go by spans -------------------------------------------------------------------

// Blocks of a launch: each that finds nothing to do costs little, but not nothing.
constexpr int64_t kMostBlocks = 16384;

// Spans that a sequence may have.
inline int64_t most_spans(const Attention& args) { return divide_up(args.capacity, kSpan); }

// Blocks of threads that share a sequence's spans, where a span's results need `blocks` of them.
inline int64_t span_shares(const Attention& args, int64_t blocks) {
  return min(max(kMostBlocks / (blocks * args.sequences), int64_t{1}), most_spans(args));
}

// A sequence's spans, as they are counted among the partial results.
struct Spans {
  Range tiles;
  int first, count;
};
// What the last row of a context sees.
__device__ __forceinline__ Spans spans_of(const Attention& args, int context) {
  const Range tiles = visible_tiles(args, context - 1, context - 1);
  const int first = tiles.first / kSpanTiles;
  return {tiles, first, tiles.last / kSpanTiles - first + 1};
}

// Partial results: values [S, H, spans, stride], then the largest score and sum of each [S, H, spans, 2].
struct Partials {
  float* values;
  float* rows;
  int stride, spans;

  __host__ __device__ Partials(const Attention& args, float* memory)
      : values(memory), stride(partial_stride(args.value_dim)) {
    spans = static_cast<int>(divide_up(args.capacity, kSpan));
    rows = memory + static_cast<int64_t>(args.sequences) * args.heads * spans * stride;
  }
  __device__ __forceinline__ int64_t index(const Attention& args, int sequence, int head, int span) const {
    return (static_cast<int64_t>(sequence) * args.heads + head) * spans + span;
  }
};

}  // namespace quire::cuda

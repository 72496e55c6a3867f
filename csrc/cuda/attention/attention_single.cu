// Attention of sequences that have one token in the step: limited by how fast keys and values come from memory.
//
// The rows of mma's tile are the query heads that share a key head, up to 16 of them. A block of threads takes some
// spans of a sequence's keys; its 4 warps share a tile's keys for the products with the query, and the columns of the
// values. Partial results of spans go to memory, and a second kernel merges them; or a block has all of a sequence, and
// merges them itself.
#include "cuda/attention/attention_tile.h"

namespace quire::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16;
constexpr int kStages = 2;
// Floats between rows of scores: 16 lanes with 8 bytes each meet no bank twice.
constexpr int kScoreStride = kKeys + 8;
constexpr int kScoreBytes = kRows * kScoreStride * static_cast<int>(sizeof(float));
// Blocks of a launch: each that finds nothing to do costs little, but not nothing.
constexpr int64_t kMostBlocks = 16384;
// Of partial results. Where they would be more, no sequence is split.
constexpr int64_t kMostPartialBytes = int64_t{256} << 20;

// A sequence's spans, as they are counted among the partial results.
struct Spans {
  Range tiles;
  int first, count;
};
__device__ __forceinline__ Spans spans_of(const Attention& args, int context) {
  const Range tiles = visible_tiles(context - 1, context - 1, args.window);
  const int first = tiles.first / kSpanTiles;
  return {tiles, first, tiles.last / kSpanTiles - first + 1};
}

// Partial results: values [S, H, spans, stride], then the largest score and sum of each [S, H, spans, 2].
struct Partials {
  float* values;
  float* rows;
  int stride, spans;

  __host__ __device__ Partials(const Attention& args, float* memory)
      : values(memory), stride(partial_stride(args.head_dim)) {
    spans = static_cast<int>(divide_up(args.capacity, kSpan));
    rows = memory + static_cast<int64_t>(args.sequences) * args.heads * spans * stride;
  }
  __device__ __forceinline__ int64_t index(const Attention& args, int sequence, int head, int span) const {
    return (static_cast<int64_t>(sequence) * args.heads + head) * spans + span;
  }
};

// A lane's share of a row of scores.
__device__ __forceinline__ void read_scores(float (&scores)[8][2], const float* from) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(from + 8 * n);
    scores[n][0] = two.x, scores[n][1] = two.y;
  }
}

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, int kD, bool kAlibi>
__global__ void __launch_bounds__(kThreads) single_kernel(Attention args, float* partial) {
  constexpr int kTiles = kD / kWarps / 8;
  using Pipeline = Tiles<T, kD, kStages, kThreads>;
  const int row_tiles = static_cast<int>(divide_up(args.group, kRows));
  const int sequence = static_cast<int>(blockIdx.z), kv_head = static_cast<int>(blockIdx.y) / row_tiles;
  const int first_row = static_cast<int>(blockIdx.y) % row_tiles * kRows;
  const int token = args.query_start[sequence];
  if (args.query_start[sequence + 1] - token != 1 || token < 0 || token >= args.tokens) return;

  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int pair = 2 * (lane % 4), first_column = warp * (kD / kWarps);
  const int count = min(kRows, args.group - first_row), first_head = kv_head * args.group + first_row;
  T* out = static_cast<T*>(args.out) + (static_cast<int64_t>(token) * args.heads + first_head) * args.head_dim;
  const int context = context_of(args, sequence);
  if (context <= 0) {
    if (blockIdx.x == 0)
      for (int i = static_cast<int>(threadIdx.x); i < count * args.head_dim; i += kThreads) out[i] = T{0};
    return;
  }

  const Spans spans = spans_of(args, context);
  const int share = static_cast<int>(divide_up(spans.count, gridDim.x));
  const int first_span = spans.first + static_cast<int>(blockIdx.x) * share;
  const Range range{max(spans.tiles.first, first_span * kSpanTiles),
                    min(spans.tiles.last, (first_span + share) * kSpanTiles - 1)};
  if (range.first > range.last) return;
  const bool whole = !partial || spans.count == 1;

  char* shared = dynamic_shared();
  float* exchange = reinterpret_cast<float*>(shared);
  Pipeline tiles(args, shared + kScoreBytes, sequence, kv_head, range, context);

  Rows rows;
  const T* queries[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const int head = first_head + min(row, count - 1);
    rows.position[half] = context - 1;
    rows.slope[half] = kAlibi ? args.slopes[head] * 1.44269504f : 0.0f;
    queries[half] = row < count ? static_cast<const T*>(args.query) + token * args.query_stride +
                                      static_cast<int64_t>(head) * args.head_dim
                                : nullptr;
  }
  Query<T, kD> query;
  query.load(args, queries, nullptr);

  const float factor = kAlibi ? 1.0f : args.factor;
  State<T, kD, kTiles> state;
  state.clear();
  Total totals[2];
  float total[kTiles][4] = {};
  for (int tile = range.first; tile <= range.last; ++tile) {
    const int key = tile * kKeys;
    const bool edge = key + kKeys > context || context - 1 - key >= args.window;
    {
      float own[2][4];  // of the warp's 16 keys
      multiply_keys<T, kD>(own, query, tiles.keys(tile), 16 * warp);
      mask<kAlibi>(own, args, rows, key + 16 * warp, edge);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float* to = exchange + (lane / 4 + 8 * half) * kScoreStride + 16 * warp + 8 * n + pair;
          *reinterpret_cast<float2*>(to) = make_float2(own[n][2 * half], own[n][2 * half + 1]);
        }
    }
    const T* values = tiles.values(tile);
    uint32_t weights[4][4] = {};
    const float* scores = exchange + lane / 4 * kScoreStride + pair;
    float own[8][2];
    read_scores(own, scores);
    state.template weigh<0>(own, factor, weights);
    if (count > 8) {
      read_scores(own, scores + 8 * kScoreStride);
      state.template weigh<1>(own, factor, weights);
    }
    state.multiply_values(weights, values, first_column / 8);

    if (tile != range.last && tile % kSpanTiles != kSpanTiles - 1) continue;
    if (whole) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        totals[half].merge(state.largest[half], state.sums[2 * half], factor);
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i)
            total[n][i] = totals[half].merged(total[n][i], state.values[n][i]);
      }
    } else {
      const Partials to(args, partial);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane / 4 + 8 * half;
        if (row >= count) continue;
        const int64_t index = to.index(args, sequence, first_head + row, tile / kSpanTiles - spans.first);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const int column = first_column + 8 * n + pair;
          if (column < to.stride)
            *reinterpret_cast<float2*>(to.values + index * to.stride + column) =
                make_float2(state.values[n][2 * half], state.values[n][2 * half + 1]);
        }
        if (warp == 0 && pair == 0)
          *reinterpret_cast<float2*>(to.rows + 2 * index) = make_float2(state.largest[half], state.sums[2 * half]);
      }
    }
    state.clear();
  }
  if (!whole) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    if (row >= count) continue;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      store_pair(args, out + row * args.head_dim, first_column + 8 * n + pair,
                 finished(total[n][2 * half], totals[half].sum), finished(total[n][2 * half + 1], totals[half].sum));
  }
}

constexpr int kMergeThreads = 64;
// Read at once: the merges wait for each other, reads need not.
constexpr int kMergeSpans = 16;

// Merges the spans of a (sequence, head).
template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(Attention args, float* partial,
                                                                          float factor) {
  const int sequence = static_cast<int>(blockIdx.x) / args.heads, head = static_cast<int>(blockIdx.x) % args.heads;
  const int token = args.query_start[sequence];
  if (args.query_start[sequence + 1] - token != 1 || token < 0 || token >= args.tokens) return;
  const int context = context_of(args, sequence);
  if (context <= 0) return;
  const Spans spans = spans_of(args, context);
  if (spans.count == 1) return;  // written already
  const Partials from(args, partial);
  const int64_t first = from.index(args, sequence, head, 0);
  T* out = static_cast<T*>(args.out) + (static_cast<int64_t>(token) * args.heads + head) * args.head_dim;
  for (int column = 2 * static_cast<int>(threadIdx.x); column < args.head_dim; column += 2 * kMergeThreads) {
    Total state;
    float2 total = make_float2(0, 0);
    for (int span = 0; span < spans.count; span += kMergeSpans) {
      float2 rows[kMergeSpans], values[kMergeSpans];
#pragma unroll
      for (int i = 0; i < kMergeSpans; ++i) {
        const int64_t index = first + min(span + i, spans.count - 1);
        rows[i] = *reinterpret_cast<const float2*>(from.rows + 2 * index);
        values[i] = *reinterpret_cast<const float2*>(from.values + index * from.stride + column);
      }
#pragma unroll
      for (int i = 0; i < kMergeSpans; ++i) {
        if (span + i >= spans.count) break;
        state.merge(rows[i].x, rows[i].y, factor);
        total = make_float2(state.merged(total.x, values[i].x), state.merged(total.y, values[i].y));
      }
    }
    store_pair(args, out, column, finished(total.x, state.sum), finished(total.y, state.sum));
  }
}

}  // namespace

int64_t most_spans(const Attention& args) { return divide_up(args.capacity, kSpan); }

int64_t partial_bytes(const Attention& args) {
  const int64_t spans = most_spans(args);
  if (spans <= 1) return 0;
  const int64_t bytes =
      static_cast<int64_t>(sizeof(float)) * args.sequences * args.heads * spans * (partial_stride(args.head_dim) + 2);
  return bytes > kMostPartialBytes ? 0 : bytes;
}

void attend_single(const Attention& args, DType dtype, float* partial, Stream stream) {
  if (partial_bytes(args) == 0) partial = nullptr;
  const int64_t rest = args.kv_heads * divide_up(args.group, kRows);
  const int64_t room = max(kMostBlocks / (rest * args.sequences), int64_t{1});
  const dim3 grid(static_cast<unsigned>(partial ? min(room, most_spans(args)) : 1), static_cast<unsigned>(rest),
                  static_cast<unsigned>(args.sequences));
  for_kind(args, dtype, [&](auto zero, auto alibi) {
    using T = decltype(zero);
    for_head_dim(args.head_dim, [&](auto head_dim) {
      constexpr int kD = decltype(head_dim)::value;
      launch(single_kernel<T, kD, decltype(alibi)::value>, grid, dim3(kThreads),
             kScoreBytes + Tiles<T, kD, kStages, kThreads>::kBytes, stream, args, partial);
    });
    if (partial)
      launch(merge_kernel<T>, dim3(static_cast<unsigned>(args.sequences * args.heads)), dim3(kMergeThreads), 0, stream,
             args, partial, alibi ? 1.0f : args.factor);
  });
}

}  // namespace quire::cuda

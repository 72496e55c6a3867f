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
constexpr int kRowBytes = kRows * static_cast<int>(sizeof(Row));
constexpr int kScoreBytes = kRows * kScoreStride * static_cast<int>(sizeof(float));
// Of partial results. Where they would be more, no sequence is split.
constexpr int64_t kMostPartialBytes = int64_t{256} << 20;

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, int kD, bool kShaped>
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
  T* out = static_cast<T*>(args.out) + (static_cast<int64_t>(token) * args.heads + first_head) * args.value_dim;
  const int context = context_of(args, sequence);
  if (context <= 0) {
    if (blockIdx.x == 0)
      for (int i = static_cast<int>(threadIdx.x); i < count * args.value_dim; i += kThreads) out[i] = T{0};
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
  Row* tile_rows = reinterpret_cast<Row*>(shared);
  float* exchange = reinterpret_cast<float*>(shared + kRowBytes);
  if (threadIdx.x < kRows) {
    const int row = static_cast<int>(threadIdx.x);
    tile_rows[row] = {context - 1, context, row < count ? token : -1, first_head + min(row, count - 1)};
  }
  const int begin = first_visible(args, context - 1);
  Pipeline tiles(args, shared + kRowBytes + kScoreBytes, sequence, kv_head, range, begin, context);

  const Row* rows = tile_rows + lane / 4;  // there since the pipeline's first barrier
  Query<T, kD> query;
  query.load(args, {query_of<T>(args, rows[0]), query_of<T>(args, rows[8])}, nullptr);

  const float factor = kShaped ? 1.0f : args.factor;
  State<T, kD, kTiles> state;
  state.clear();
  Total totals[2];
  float total[kTiles][4] = {};
  for (int tile = range.first; tile <= range.last; ++tile) {
    const int key = tile * kKeys;
    const bool edge = key + kKeys > context || key < begin;
    {
      float own[2][4];  // of the warp's 16 keys
      multiply_keys<T, kD>(own, query, tiles.keys(tile), 16 * warp);
      mask<kShaped>(own, args, rows, key + 16 * warp, edge);
      write_scores(own, exchange + lane / 4 * kScoreStride + 16 * warp + pair);
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
    totals[half].close(args, first_head + row, factor);
    const float old = totals[half].old, sum = totals[half].sum;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      store_pair(args, out + row * args.value_dim, first_column + 8 * n + pair, finished(total[n][2 * half] * old, sum),
                 finished(total[n][2 * half + 1] * old, sum));
  }
}

constexpr int kMergeThreads = 64;
// Read at once: the merges wait for each other, reads need not.
constexpr int kMergeSpans = 16;

// Merges the spans of a (sequence, head).
template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(Attention args, float* partial) {
  const int sequence = static_cast<int>(blockIdx.x) / args.heads, head = static_cast<int>(blockIdx.x) % args.heads;
  const int token = args.query_start[sequence];
  if (args.query_start[sequence + 1] - token != 1 || token < 0 || token >= args.tokens) return;
  const int context = context_of(args, sequence);
  if (context <= 0) return;
  const Spans spans = spans_of(args, context);
  if (spans.count == 1) return;  // written already
  const float factor = args.shaped ? 1.0f : args.factor;
  const Partials from(args, partial);
  const int64_t first = from.index(args, sequence, head, 0);
  T* out = static_cast<T*>(args.out) + (static_cast<int64_t>(token) * args.heads + head) * args.value_dim;
  for (int column = 2 * static_cast<int>(threadIdx.x); column < args.value_dim; column += 2 * kMergeThreads) {
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
    state.close(args, head, factor);
    store_pair(args, out, column, finished(total.x * state.old, state.sum), finished(total.y * state.old, state.sum));
  }
}

}  // namespace

int64_t partial_bytes(const Attention& args) {
  const int64_t spans = most_spans(args);
  if (spans <= 1) return 0;
  const int64_t bytes =
      static_cast<int64_t>(sizeof(float)) * args.sequences * args.heads * spans * (partial_stride(args.value_dim) + 2);
  return bytes > kMostPartialBytes ? 0 : bytes;
}

void attend_single(const Attention& args, DType dtype, float* partial, Stream stream) {
  const int64_t rest = args.kv_heads * divide_up(args.group, kRows);
  const dim3 grid(static_cast<unsigned>(partial ? span_shares(args, rest) : 1), static_cast<unsigned>(rest),
                  static_cast<unsigned>(args.sequences));
  for_kind(args, dtype, [&](auto zero, auto shaped) {
    using T = decltype(zero);
    for_head_dim(args, [&](auto head_dim) {
      constexpr int kD = decltype(head_dim)::value;
      launch(single_kernel<T, kD, decltype(shaped)::value>, grid, dim3(kThreads),
             kRowBytes + kScoreBytes + Tiles<T, kD, kStages, kThreads>::kBytes, stream, args, partial);
    });
  });
  merge_spans(args, dtype, partial, stream);
}

void merge_spans(const Attention& args, DType dtype, float* partial, Stream stream) {
  if (!partial) return;
  const dim3 grid(static_cast<unsigned>(args.sequences * args.heads));
  launch(dtype == DType::bfloat16 ? merge_kernel<bf16> : merge_kernel<f16>, grid, dim3(kMergeThreads), 0, stream, args,
         partial);
}

}  // namespace quire::cuda

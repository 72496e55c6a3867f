// Attention of heads wider than 256: of latent rows (arXiv:2405.04434), which many query heads share, above all.
//
// Every sequence is carried out here, in tiles of 16 rows (as attention_many.cu's, or the heads of a single token): a
// block's 8 warps share a tile's keys for the products with the query, and the columns of the values, as in
// attention_single.cu. Single tokens' spans are shared out to several blocks, as there.
#include "cuda/attention/attention_tile.h"

namespace quire::cuda {
namespace {

constexpr int kWarps = kKeys / 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16;
constexpr int kRowBytes = kRows * static_cast<int>(sizeof(Row));
constexpr int kScoreBytes = kRows * kScoreStride * static_cast<int>(sizeof(float));

template <class T>
using WideTiles = Tiles<T, kMostKeyDim, 1, kThreads, kMostValueDim>;
template <class T>
using WideQuery = CommonQuery<T, kMostKeyDim>;
template <class T>
constexpr int kBytes = kRowBytes + kScoreBytes + WideQuery<T>::kBytes + WideTiles<T>::kBytes;

// A block's: rows of a sequence's tile, and a share of its spans.
struct Work {
  int sequence, tile, kv_head;  // sequence < 0: none
  int share, shares;
};

// Of the sequences of one token (single), or of those of several.
__device__ Work find_work(const Attention& args, bool single) {
  if (!single) {
    const Place place = find_tile(args, static_cast<int>(blockIdx.x), kRows);
    return {place.sequence, place.tile, static_cast<int>(blockIdx.y), 0, 1};
  }
  const int tiles = static_cast<int>(divide_up(args.group, kRows)), tile = static_cast<int>(blockIdx.y);
  const int sequence = static_cast<int>(blockIdx.z);
  const bool one = args.query_start[sequence + 1] - args.query_start[sequence] == 1;
  return {one ? sequence : -1, tile % tiles, tile / tiles, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
}

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, bool kShaped>
__global__ void __launch_bounds__(kThreads) wide_kernel(Attention args, float* partial, bool single) {
  constexpr int kTiles = kMostValueDim / kWarps / 8;
  const Work work = find_work(args, single);
  if (work.sequence < 0) return;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int pair = 2 * (lane % 4), first_column = warp * (kMostValueDim / kWarps);
  const int start = args.query_start[work.sequence], tokens = args.query_start[work.sequence + 1] - start;
  if (start < 0 || start + tokens > args.tokens) return;
  const int context = context_of(args, work.sequence), before = context - tokens;
  // Rows past the last are computed as the last is, and not written.
  const int first_row = work.tile * kRows, last_row = min(first_row + kRows, tokens * args.group) - 1;
  const int low = before + first_row / args.group, high = before + last_row / args.group;

  char* shared = dynamic_shared();
  Row* tile_rows = reinterpret_cast<Row*>(shared);
  shared += kRowBytes;
  if (threadIdx.x < kRows) {
    const int row = first_row + static_cast<int>(threadIdx.x);
    tile_rows[threadIdx.x] = row_of(args, start, before, work.kv_head, min(row, last_row));
    if (row > last_row) tile_rows[threadIdx.x].token = -1;
  }
  __syncthreads();
  const Row* rows = tile_rows + lane / 4;

  const float factor = kShaped ? 1.0f : args.factor;
  State<T, kMostValueDim, kTiles> state;
  Total totals[2];
  float total[kTiles][4] = {};
  bool whole = true;
  if (high >= 0) {
    const int begin = first_visible(args, low), last_begin = first_visible(args, high);
    const int end = min(tile_rows[kRows - 1].end, context);
    const Range all = visible_tiles(args, max(low, 0), end - 1);
    const int before_span = all.first / kSpanTiles, spans = all.last / kSpanTiles - before_span + 1;
    const int share = static_cast<int>(divide_up(spans, work.shares)), first_span = before_span + work.share * share;
    const Range range{max(all.first, first_span * kSpanTiles), min(all.last, (first_span + share) * kSpanTiles - 1)};
    if (range.first > range.last) return;
    whole = !partial || spans == 1;

    float* exchange = reinterpret_cast<float*>(shared);
    WideQuery<T> query;
    query.load(args, {query_of<T>(args, rows[0]), query_of<T>(args, rows[8])}, shared + kScoreBytes);
    WideTiles<T> tiles(args, shared + kScoreBytes + WideQuery<T>::kBytes, work.sequence, work.kv_head, range, begin,
                       end);
    state.clear();
    for (int tile = range.first; tile <= range.last; ++tile) {
      const int key = tile * kKeys;
      const bool edge = key + kKeys > low + 1 || key < last_begin;
      {
        float own[1][4];  // of the warp's 8 keys
        multiply_keys<T, kMostKeyDim>(own, query, tiles.keys(tile), 8 * warp);
        mask<kShaped>(own, args, rows, key + 8 * warp, edge);
        write_scores(own, exchange + lane / 4 * kScoreStride + 8 * warp + pair);
      }
      const T* values = tiles.values(tile);
      uint32_t weights[4][4];
      const float* scores = exchange + lane / 4 * kScoreStride + pair;
      float own[8][2];
      read_scores(own, scores);
      state.template weigh<0>(own, factor, weights);
      read_scores(own, scores + 8 * kScoreStride);
      state.template weigh<1>(own, factor, weights);
      state.multiply_values(weights, values, first_column / 8);

      if (tile != range.last && tile % kSpanTiles != kSpanTiles - 1) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (whole) {
          totals[half].merge(state.largest[half], state.sums[2 * half], factor);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i)
              total[n][i] = totals[half].merged(total[n][i], state.values[n][i]);
        } else if (rows[8 * half].token >= 0) {
          const Partials to(args, partial);
          const int64_t index = to.index(args, work.sequence, rows[8 * half].head, tile / kSpanTiles - before_span);
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
  }
  if (!whole) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Row row = rows[8 * half];
    if (row.token < 0) continue;
    T* out = out_of<T>(args, row);
    const bool none = row.position < 0;  // a token of no context
    totals[half].close(args, row.head, factor);
    const float old = totals[half].old, sum = totals[half].sum;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      store_pair(args, out, first_column + 8 * n + pair, none ? 0.0f : finished(total[n][2 * half] * old, sum),
                 none ? 0.0f : finished(total[n][2 * half + 1] * old, sum));
  }
}

}  // namespace

void attend_wide_single(const Attention& args, DType dtype, float* partial, Stream stream) {
  const int64_t rest = args.kv_heads * divide_up(args.group, kRows);
  const dim3 grid(static_cast<unsigned>(partial ? span_shares(args, rest) : 1), static_cast<unsigned>(rest),
                  static_cast<unsigned>(args.sequences));
  for_kind(args, dtype, [&](auto zero, auto shaped) {
    using T = decltype(zero);
    launch(wide_kernel<T, decltype(shaped)::value>, grid, dim3(kThreads), kBytes<T>, stream, args, partial, true);
  });
  merge_spans(args, dtype, partial, stream);
}

void attend_wide_many(const Attention& args, DType dtype, Stream stream) {
  const dim3 grid(static_cast<unsigned>(most_tiles(args, kRows)), static_cast<unsigned>(args.kv_heads));
  float* none = nullptr;
  for_kind(args, dtype, [&](auto zero, auto shaped) {
    using T = decltype(zero);
    launch(wide_kernel<T, decltype(shaped)::value>, grid, dim3(kThreads), kBytes<T>, stream, args, none, false);
  });
}

}  // namespace quire::cuda

// Attention of sequences that have several tokens in the step: limited by how fast tensor cores multiply.
//
// A sequence's rows are its tokens with, for each, the query heads that share a key head. A block of threads takes a
// tile of rows, 16 to a warp, and goes over all the keys that they see. The total of the spans before lies in shared
// memory, so that registers hold the current span's only.
#include "cuda/attention/attention_tile.h"

namespace quire::cuda {
namespace {

// From here on, tiles of 128 rows are enough blocks for a GPU; they read keys half as often as those of 64.
constexpr int64_t kEnoughBlocks = 96;

// The largest head size has no registers for the query, and no room for two stages.
template <class T, int kD>
using QueryOf = std::conditional_t<kD <= 128, Query<T, kD>, SharedQuery<T, kD>>;
template <class T, int kD, int kWarps>
using TilesOf = Tiles<T, kD, kD <= 128 ? 2 : 1, kWarps * kWarp>;

template <int kD, int kWarps>
constexpr int kTotalBytes = 16 * kWarps * kD * static_cast<int>(sizeof(float));

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, int kD, int kWarps, bool kShaped>
__global__ void __launch_bounds__(kWarps * kWarp) many_kernel(Attention args) {
  constexpr int kRows = 16 * kWarps, kTiles = kD / 8;
  const Place place = find_tile(args, static_cast<int>(blockIdx.x), kRows);
  if (place.sequence < 0) return;
  const int kv_head = static_cast<int>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int start = args.query_start[place.sequence], tokens = args.query_start[place.sequence + 1] - start;
  if (start < 0 || start + tokens > args.tokens) return;
  const int context = context_of(args, place.sequence), before = context - tokens;
  // Rows past the last are computed as the last is, and not written.
  const int first_row = place.tile * kRows, last_row = min(first_row + kRows, tokens * args.group) - 1;
  const int low = before + first_row / args.group, high = before + last_row / args.group;

  char* shared = dynamic_shared();
  Row* tile_rows = reinterpret_cast<Row*>(shared);
  shared += kRows * sizeof(Row);
  if (threadIdx.x < kRows) {
    const int row = first_row + static_cast<int>(threadIdx.x);
    tile_rows[threadIdx.x] = row_of(args, start, before, kv_head, min(row, last_row));
    if (row > last_row) tile_rows[threadIdx.x].token = -1;
  }
  __syncthreads();
  const Row* rows = tile_rows + 16 * warp + lane / 4;
  const int pair = 2 * (lane % 4);
  State<T, kD, kTiles> state;
  state.clear();
  Total totals[2];
  if (high >= 0) {
    const int begin = first_visible(args, low), last_begin = first_visible(args, high);
    const int end = min(tile_rows[kRows - 1].end, context);
    const Range range = visible_tiles(args, max(low, 0), end - 1);
    TilesOf<T, kD, kWarps> tiles(args, shared, place.sequence, kv_head, range, begin, end);
    shared += TilesOf<T, kD, kWarps>::kBytes;
    QueryOf<T, kD> query;
    query.load(args, {query_of<T>(args, rows[0]), query_of<T>(args, rows[8])}, shared);
    shared += kWarps * QueryOf<T, kD>::kBytes;
    // Each lane keeps its own elements here. Written before it is read, unless a table holds one span only.
    float4* total = reinterpret_cast<float4*>(shared) + warp * kTiles * kWarp + lane;

    const float factor = kShaped ? 1.0f : args.factor;
    const int warp_end = tile_rows[16 * warp + 15].end;
    for (int tile = range.first; tile <= range.last; ++tile) {
      const int key = tile * kKeys;
      const bool seen = key < warp_end;
      const bool edge = key + kKeys > low + 1 || key < last_begin;
      uint32_t weights[4][4];
      const T* keys = tiles.keys(tile);
      if (seen) {
        float scores[8][4];
        multiply_keys<T, kD>(scores, query, keys, 0);
        mask<kShaped>(scores, args, rows, key, edge);
        float halves[2][8][2];
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) halves[i / 2][n][i % 2] = scores[n][i];
        state.template weigh<0>(halves[0], factor, weights);
        state.template weigh<1>(halves[1], factor, weights);
      }
      const T* values = tiles.values(tile);
      if (seen) state.multiply_values(weights, values, 0);

      const bool last = tile == range.last;
      if (!last && tile % kSpanTiles != kSpanTiles - 1) continue;
      const bool first = tile / kSpanTiles == range.first / kSpanTiles;
#pragma unroll
      for (int half = 0; half < 2; ++half) totals[half].merge(state.largest[half], state.sums[2 * half], factor);
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        float4 old = make_float4(0, 0, 0, 0);
        if (!first) old = total[n * kWarp];
        state.values[n][0] = totals[0].merged(old.x, state.values[n][0]);
        state.values[n][1] = totals[0].merged(old.y, state.values[n][1]);
        state.values[n][2] = totals[1].merged(old.z, state.values[n][2]);
        state.values[n][3] = totals[1].merged(old.w, state.values[n][3]);
      }
      if (last) break;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
        total[n * kWarp] = make_float4(state.values[n][0], state.values[n][1], state.values[n][2], state.values[n][3]);
      state.clear();
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Row row = rows[8 * half];
    if (row.token < 0) continue;
    T* out = out_of<T>(args, row);
    const bool none = row.position < 0;  // a token of no context
    Total& total = totals[half];
    total.close(args, row.head, kShaped ? 1.0f : args.factor);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float first = state.values[n][2 * half] * total.old, second = state.values[n][2 * half + 1] * total.old;
      store_pair(args, out, 8 * n + pair, none ? 0.0f : finished(first, total.sum),
                 none ? 0.0f : finished(second, total.sum));
    }
  }
}

}  // namespace

void attend_many(const Attention& args, DType dtype, Stream stream) {
  const int64_t packed = static_cast<int64_t>(args.tokens) * args.group;
  const bool large = packed / 128 * args.kv_heads >= kEnoughBlocks;
  for_kind(args, dtype, [&](auto zero, auto shaped) {
    using T = decltype(zero);
    for_head_dim(args, [&](auto head_dim) {
      constexpr int kD = decltype(head_dim)::value;
      const auto start = [&](auto warps) {
        constexpr int kWarps = decltype(warps)::value;
        const int total = args.capacity > kSpan ? kTotalBytes<kD, kWarps> : 0;
        const dim3 grid(static_cast<unsigned>(most_tiles(args, 16 * kWarps)), static_cast<unsigned>(args.kv_heads));
        launch(many_kernel<T, kD, kWarps, decltype(shaped)::value>, grid, dim3(kWarps * kWarp),
               16 * kWarps * sizeof(Row) + TilesOf<T, kD, kWarps>::kBytes + kWarps * QueryOf<T, kD>::kBytes + total,
               stream, args);
      };
      if constexpr (kD <= 128) {
        if (large) return start(std::integral_constant<int, 8>{});
      }
      start(std::integral_constant<int, 4>{});
    });
  });
}

}  // namespace quire::cuda

// What adapters add to `linear` (arXiv:2106.09685), any mixture of them in two launches: `shrink` makes x a^T of every
// segment's rows, `expand` takes it times B and changes y.
//
// The segments lie on the device and the host knows only how many there may be: so it starts as many blocks as any
// segments can need, and each finds its own tile of rows, or none. A row's bits depend on its own adapters: x a^T is
// product.h's sum; over the rank, m16n8k16 products follow each other from the first 16 on, to the adapter's own rank.
#include "cuda/common/kernels.h"
#include "cuda/linear/lora_ranges.h"
#include "cuda/linear/product.h"

namespace quire::cuda {
namespace {

// -- x a^T -----------------------------------------------------------------------------------------------------------

// What one block of `shrink` does: rows of x times a tile of a's rows.
template <class T>
struct Share {
  Rows<T> a, x;
  float* hidden;
};

// The block's tile of kTokens tokens and, from row `start` of a on, of at most `most`. False: there is nothing to do.
template <class T, int kTokens>
__device__ __forceinline__ bool find_share(const LoraArgs& args, int start, int most, Share<T>& share) {
  const LoraTarget& target = args.targets[blockIdx.z];
  Range range;
  if (!target.entries || !find_range<kTokens, false>(args, static_cast<int>(blockIdx.x), range)) return false;
  const LoraSegment* segment = args.segments + range.segment;
  const LoraEntry* entry = entry_of(target, segment->slot);
  if (!entry || start >= rank_of(args, *entry)) return false;
  int64_t layer = 0;
  while (layer < range.segment && same_rows(segment[0], segment[-1 - layer])) ++layer;
  if (layer >= args.layers) return false;
  const T* a = static_cast<const T*>(entry->a) + start * args.features;
  const T* x = static_cast<const T*>(args.x) + range.first * args.x_stride;
  share.a = {a, args.features, min(rank_of(args, *entry) - start, most)};
  share.x = {x, args.x_stride, range.count};
  share.hidden = hidden_of(args, blockIdx.z, layer, range.first) + start;
  return true;
}

template <class T, int kRowTiles, int kTokenTiles, int kDepth>
__global__ void __launch_bounds__(kWarp * kMostParts) shrink_kernel(const LoraArgs args, bool wide) {
  Share<T> share;
  const int start = static_cast<int>(blockIdx.y) * 16 * kRowTiles;
  if (!find_share<T, 8 * kTokenTiles>(args, start, 16 * kRowTiles, share)) return;
  const int features = static_cast<int>(args.features);
  const auto finish = [&](int row, int token, float sum) { share.hidden[token * args.max_rank + row] = sum; };
  if (wide && is_aligned(share.a.data, 16)) {
    product_of_few<T, kRowTiles, kTokenTiles, kDepth, true>(PlainRows<T, true>{share.a}, share.x, features, finish);
  } else {
    product_of_few<T, kRowTiles, kTokenTiles, 1, false>(PlainRows<T, false>{share.a}, share.x, features, finish);
  }
}

constexpr int kFloatWarps = 8;

__global__ void __launch_bounds__(kWarp * kFloatWarps) shrink_floats_kernel(const LoraArgs args) {
  const int tile = static_cast<int>(blockIdx.y) * kFloatWarps + static_cast<int>(threadIdx.x / kWarp);
  Share<float> share;
  if (!find_share<float, kFloatTokens>(args, tile * kFloatRows, kFloatRows, share)) return;
  product_of_floats(share.a, share.x, static_cast<int>(args.features),
                    [&](int row, int token, float sum) { share.hidden[token * args.max_rank + row] = sum; });
}

template <class T, int kRowTiles, int kTokenTiles, int kDepth>
void launch_shrink(const LoraArgs& args, Stream stream) {
  const int parts = parts_of(args.features);
  const bool wide = args.features % 8 == 0 && (args.x_stride % 8 == 0 || args.tokens == 1) && are_aligned(args.x);
  const dim3 grid(most_ranges<8 * kTokenTiles, false>(args),
                  static_cast<unsigned>(divide_up(args.max_rank, 16 * kRowTiles)),
                  static_cast<unsigned>(args.num_targets));
  launch(shrink_kernel<T, kRowTiles, kTokenTiles, kDepth>, grid, dim3(static_cast<unsigned>(kWarp * parts)),
         shared_of_few<kRowTiles, kTokenTiles>(parts), stream, args, wide);
}

// -- times B ---------------------------------------------------------------------------------------------------------

constexpr int kWarpColumns = 32;
constexpr int kWarps = 4;
constexpr int kColumns = kWarpColumns * kWarps;  // of a block

__host__ __device__ __forceinline__ int64_t column_tiles(const LoraTarget& target) {
  return target.entries ? divide_up(target.rows, kColumns) : 0;
}

// The target that the block works on, and the first of its columns of that. False: none.
__device__ __forceinline__ bool find_columns(const LoraArgs& args, int& target, int64_t& column) {
  int64_t tile = blockIdx.y;
  for (target = 0; target < args.num_targets; ++target) {
    const int64_t tiles = column_tiles(args.targets[target]);
    if (tile < tiles) {
      column = tile * kColumns;
      return true;
    }
    tile -= tiles;
  }
  return false;
}

// One adapter's share in one segment.
struct Change {
  const LoraEntry* entry;
  const float* hidden;  // of the tile's first row
  int rank;
  float factor;
};

// Calls function(change) for every adapter that changes anything in the run of segments, in their order.
template <class Function>
__device__ __forceinline__ void for_changes(const LoraArgs& args, int target, const Range& range,
                                            const Function& function) {
  for (int64_t layer = 0; layer < args.layers; ++layer) {
    const LoraSegment* segment = args.segments + range.segment + layer;
    if (range.segment + layer >= args.num_segments || !same_rows(*segment, segment[-layer])) return;
    const LoraEntry* entry = entry_of(args.targets[target], segment->slot);
    if (!entry) continue;
    const int rank = rank_of(args, *entry);
    if (!rank && !entry->scale && !entry->shift) continue;
    function(Change{entry, hidden_of(args, target, layer, range.first), rank,
                    static_cast<float>(entry->scaling * segment->weight)});
  }
}

__device__ __forceinline__ float changed(float y, float delta, const Change& change, int64_t column) {
  if (change.rank) y = fmaf(delta, change.factor, y);
  if (change.entry->scale) y *= change.entry->scale[column];
  if (change.entry->shift) y += change.entry->shift[column];
  return y;
}

// Values k .. k + 3 of a row, zeros from `rank` on. kWide: in one piece.
template <bool kWide, class T>
__device__ __forceinline__ uint2 load_four(const T* row, int k, int rank) {
  if constexpr (kWide) {
    return k < rank ? *reinterpret_cast<const uint2*>(row + k) : make_uint2(0, 0);
  } else {
    uint32_t bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bits[i] = k + i < rank ? row[k + i].bits : 0u;
    return make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
  }
}
template <class T, bool kWide>
__device__ __forceinline__ uint2 load_four_rounded(const float* row, int k, int rank) {
  float4 values = make_float4(0, 0, 0, 0);
  if constexpr (kWide) {
    if (k < rank) values = *reinterpret_cast<const float4*>(row + k);
  } else {
    if (k < rank) values.x = row[k];
    if (k + 1 < rank) values.y = row[k + 1];
    if (k + 2 < rank) values.z = row[k + 2];
    if (k + 3 < rank) values.w = row[k + 3];
  }
  return make_uint2(pack2<T>(values.x, values.y), pack2<T>(values.z, values.w));
}

// delta += a warp's 32 columns of B times 8 kTokenTiles tokens. Lane (g, t) has k = 4 t .. 4 t + 3 of 16. Row g of
// product i is column 4 g + 2 i, row g + 8 the next one: so a lane's sums are of four columns in a row, `columns` of
// which exist. b: from the lane's first column on; hidden: from the tile's first token on.
template <class T, int kTokenTiles, bool kWide>
__device__ __forceinline__ void multiply_rank(float (&delta)[2][kTokenTiles][4], const T* b, int columns,
                                              const float* hidden, int64_t hidden_stride, int tokens, int rank) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  constexpr int kUnroll = kWide ? 2 : 1;
  hidden += g * hidden_stride;
#pragma unroll kUnroll
  for (int start = 0; start < rank; start += 16) {
    const int k = start + 4 * t;
    uint2 w[4], h[kTokenTiles];
#pragma unroll
    for (int c = 0; c < 4; ++c) w[c] = load_four<kWide>(b + c * rank, k, c < columns ? rank : 0);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
      h[j] = load_four_rounded<T, kWide>(hidden + 8 * j * hidden_stride, k, 8 * j + g < tokens ? rank : 0);
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (8 * j < tokens)
          mma<T>(delta[i][j], {w[2 * i].x, w[2 * i + 1].x, w[2 * i].y, w[2 * i + 1].y}, {h[j].x, h[j].y});
  }
}

// Four values of a row of y that follow each other: in one piece where `whole`, else as many as there are.
template <class Y>
union Four {
  Y values[4];
  uint2 words[sizeof(Y) / 2];
};
template <class Y>
__device__ __forceinline__ void load_columns(float (&values)[4], const Y* from, int count, bool whole) {
  Four<Y> four;
  if (whole) {
#pragma unroll
    for (size_t i = 0; i < sizeof(Y) / 2; ++i) four.words[i] = reinterpret_cast<const uint2*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) four.values[i] = i < count ? from[i] : Y{};
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = to_float(four.values[i]);
}
template <class Y>
__device__ __forceinline__ void store_columns(Y* to, const float (&values)[4], int count, bool whole) {
  Four<Y> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.values[i] = from_float<Y>(values[i]);
  if (whole) {
#pragma unroll
    for (size_t i = 0; i < sizeof(Y) / 2; ++i) reinterpret_cast<uint2*>(to)[i] = four.words[i];
  } else {
    for (int i = 0; i < 4; ++i)
      if (i < count) to[i] = four.values[i];
  }
}

// Y: what y is of. A tile of y is read once and written once, whatever number of adapters its rows have.
template <class T, class Y, int kTokenTiles>
__global__ void __launch_bounds__(kWarp * kWarps, kTokenTiles == 1 ? 6 : 3) expand_kernel(
    const LoraArgs args) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  int target;
  int64_t column;
  Range range;
  if (!find_columns(args, target, column)) return;
  column += threadIdx.x / kWarp * kWarpColumns;
  const int64_t width = args.targets[target].rows;
  if (column >= width || !find_range<8 * kTokenTiles, true>(args, static_cast<int>(blockIdx.x), range)) return;

  const int64_t own = column + 4 * g, place = args.targets[target].first + own;
  const int count = static_cast<int>(max(min(width - own, int64_t{4}), int64_t{0}));  // of the lane's columns
  const bool whole = count == 4 && place % 4 == 0 && args.columns % 4 == 0 && is_aligned(static_cast<Y*>(args.y), 8);
  const auto row_at = [&](int token) { return static_cast<Y*>(args.y) + (range.first + token) * args.columns + place; };
  float y[kTokenTiles][2][4];
  bool loaded = false;
  for_changes(args, target, range, [&](const Change& change) {
    if (!loaded) {
      loaded = true;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int token = 8 * j + 2 * t + e;
          if (token < range.count) load_columns(y[j][e], row_at(token), count, whole);
        }
    }
    float delta[2][kTokenTiles][4];
    clear(delta);
    if (change.rank) {
      const T* b = static_cast<const T*>(change.entry->b) + own * change.rank;
      const bool wide = change.rank % 4 == 0 && args.max_rank % 4 == 0 &&
                        is_aligned(static_cast<const T*>(change.entry->b), 8) && is_aligned(args.hidden, 16);
      if (wide) {
        multiply_rank<T, kTokenTiles, true>(delta, b, count, change.hidden, args.max_rank, range.count, change.rank);
      } else {
        multiply_rank<T, kTokenTiles, false>(delta, b, count, change.hidden, args.max_rank, range.count, change.rank);
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c >= count) break;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) y[j][e][c] = changed(y[j][e][c], delta[c / 2][j][c % 2 * 2 + e], change, own + c);
    }
  });
  if (!loaded) return;
#pragma unroll
  for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = 8 * j + 2 * t + e;
      if (token < range.count) store_columns(row_at(token), y[j][e], count, whole);
    }
}

// The same for float: a column for each thread, the sum over the rank in its order.
__global__ void __launch_bounds__(kColumns) expand_floats_kernel(const LoraArgs args) {
  int target;
  int64_t column;
  Range range;
  if (!find_columns(args, target, column)) return;
  if (!find_range<kFloatTokens, true>(args, static_cast<int>(blockIdx.x), range)) return;
  column += threadIdx.x;
  if (column >= args.targets[target].rows) return;
  float* y = static_cast<float*>(args.y) + range.first * args.columns + args.targets[target].first + column;
  for_changes(args, target, range, [&](const Change& change) {
    float delta[kFloatTokens] = {};
    for (int k = 0; k < change.rank; ++k) {
      const float b = static_cast<const float*>(change.entry->b)[column * change.rank + k];
#pragma unroll
      for (int j = 0; j < kFloatTokens; ++j)
        if (j < range.count) delta[j] = fmaf(b, change.hidden[j * args.max_rank + k], delta[j]);
    }
#pragma unroll
    for (int j = 0; j < kFloatTokens; ++j)
      if (j < range.count) y[j * args.columns] = changed(y[j * args.columns], delta[j], change, column);
  });
}

template <class T, class Y, int kTokenTiles>
void launch_expand(const LoraArgs& args, unsigned columns, Stream stream) {
  launch(expand_kernel<T, Y, kTokenTiles>, dim3(most_ranges<8 * kTokenTiles, true>(args), columns),
         dim3(kWarp * kWarps), 0, stream, args);
}

template <class T>
void start(const LoraArgs& args, unsigned columns, Stream stream) {
  const bool few = args.tokens <= 64;
  if (few) {
    launch_shrink<T, 1, 1, 3>(args, stream);
  } else if (args.max_rank <= 16) {
    launch_shrink<T, 1, 4, 2>(args, stream);
  } else {
    launch_shrink<T, 2, 4, 2>(args, stream);
  }
  if (args.out_dtype == DType::float32) {
    (few ? launch_expand<T, float, 1> : launch_expand<T, float, 4>)(args, columns, stream);
  } else {
    (few ? launch_expand<T, T, 1> : launch_expand<T, T, 4>)(args, columns, stream);
  }
}

template <>
void start<float>(const LoraArgs& args, unsigned columns, Stream stream) {
  launch(shrink_floats_kernel,
         dim3(most_ranges<kFloatTokens, false>(args),
              static_cast<unsigned>(divide_up(args.max_rank, kFloatRows * kFloatWarps)),
              static_cast<unsigned>(args.num_targets)),
         dim3(kWarp * kFloatWarps), 0, stream, args);
  launch(expand_floats_kernel, dim3(most_ranges<kFloatTokens, true>(args), columns), dim3(kColumns), 0, stream, args);
}

}  // namespace

void lora(const LoraArgs& args, Stream stream) {
  int64_t columns = 0;
  for (int64_t i = 0; i < args.num_targets; ++i) columns += column_tiles(args.targets[i]);
  for_dtype(args.dtype, [&](auto zero) { start<decltype(zero)>(args, static_cast<unsigned>(columns), stream); });
}

}  // namespace quire::cuda

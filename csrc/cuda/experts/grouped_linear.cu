// y = x W^T + b where each row of x has the weights of its own expert; rows come sorted by expert.
//
// How many rows an expert has stands on the device: a grid has as many blocks as any routing can need. A block looks
// for its tile among those of all experts' rows, none of which is filled up, and ends where there is none. Tiles are
// `linear`'s, so that a row has the bits that it has there.
#include <algorithm>

#include "cuda/linear/tiles.h"

namespace quire::cuda {
namespace {

// products: without addresses, which are each expert's own.
struct Grouped {
  Launch launch;
  const int32_t* starts;  // [experts + 1]
  const Weight* weights;  // [experts, weights_each], from the first of this launch on
  int experts, weights_each;
};

// Items in a row have `tiles_of(item)` tiles each: finds the item of the tile of this number, and the tile's number
// within it. False: there are not so many tiles. The whole warp asks, and learns the same. (lora_ranges.h has this search
// written into its own: with what it finds held here, `expand` has too few registers.)
template <class TilesOf>
__device__ __forceinline__ bool find_item(int64_t items, int tile, const TilesOf& tiles_of, int64_t& item,
                                          int& within) {
  constexpr int kEach = 4;  // items of a lane
  const int lane = threadIdx.x % kWarp;
  for (int64_t base = 0; base < items; base += kWarp * kEach) {
    int tiles[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t candidate = base + lane * kEach + i;
      tiles[i] = candidate < items ? tiles_of(candidate) : 0;
      own += tiles[i];
    }
    int before = own;
    for (int step = 1; step < kWarp; step *= 2) {
      const int more = __shfl_up_sync(kAllLanes, before, static_cast<unsigned>(step));
      if (lane >= step) before += more;
    }
    const int all = __shfl_sync(kAllLanes, before, kWarp - 1);
    before -= own;
    if (tile >= all) {
      tile -= all;
      continue;
    }
    int rest = tile - before, place = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (place != i || rest < tiles[i]) continue;
      rest -= tiles[i];
      ++place;
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, tile >= before && tile < before + own))) - 1;
    item = base + owner * kEach + __shfl_sync(kAllLanes, place, owner);
    within = __shfl_sync(kAllLanes, rest, owner);
    return true;
  }
  return false;
}

// Calls make(piece) with what the block, or the warp, of this number does, if there is anything. kRows and kTokens are
// those of a tile; `group` is spot_of's.
template <int kRows, int kTokens, class Make>
__device__ __forceinline__ void for_tile(const Grouped& args, int64_t number, int64_t group, const Make& make) {
  const Launch& launch = args.launch;
  const auto row_at = [&](int64_t place) {
    return min(max(args.starts[place], 0), launch.tokens);  // no more than there is memory for
  };
  const auto tiles_of = [&](int64_t expert) {
    const int rows = row_at(expert + 1) - row_at(expert);
    return rows > 0 ? static_cast<int>(divide_up(rows, kTokens)) : 0;
  };
  const int64_t down = row_tiles<kRows>(launch), tile = number / down;
  int64_t expert;
  int within;
  if (!find_item(args.experts, static_cast<int>(tile), tiles_of, expert, within)) return;
  const int64_t first = row_at(expert), end = row_at(expert + 1);
  const Spot spot = spot_of(within * down + number % down, down, divide_up(end - first, kTokens), group);
  const Place place = place_of<kRows>(launch, spot.down);
  const Weight& weight = args.weights[expert * args.weights_each + place.product];
  const Product& shape = launch.products[place.product];
  const Product product{weight.data, weight.bias, shape.rows, shape.first};
  make(Piece{product, place.row, first + spot.across * kTokens, end});
}

// As many tiles of kTokens rows as any routing makes.
template <int kTokens>
int64_t most_tiles(const Grouped& args) {
  const int64_t rows = args.launch.tokens, with_rows = std::min<int64_t>(rows, args.experts);
  return (rows + with_rows * (kTokens - 1)) / kTokens;
}

// An expert's tiles of tokens follow each other for the same rows of its weights: these come from memory once.
constexpr int64_t kGroupOfFew = 1;

template <class T, int kTokenTiles, int kDepth, bool kWide>
__global__ void __launch_bounds__(kWarp * kMostParts, blocks_at_once(kTokenTiles)) few_kernel(
    const Grouped args) {
  for_tile<16, 8 * kTokenTiles>(args, blockIdx.x, kGroupOfFew, [&](const Piece& piece) {
    few_tile<T, 1, kTokenTiles, kDepth, kWide>(args.launch, piece);
  });
}

template <class T, int kTokenTiles, int kDepth, bool kWide>
void launch_few(const Grouped& args, Stream stream) {
  const int parts = parts_of(args.launch.features);
  const int64_t blocks = row_tiles<16>(args.launch) * most_tiles<8 * kTokenTiles>(args);
  launch(few_kernel<T, kTokenTiles, kDepth, kWide>, dim3(static_cast<unsigned>(blocks)),
         dim3(static_cast<unsigned>(kWarp * parts)), shared_of_few<1, kTokenTiles>(parts), stream, args);
}

template <class T, class Shape, bool kWide>
__global__ void __launch_bounds__(Shape::kThreads) many_kernel(const Grouped args) {
  for_tile<Shape::kRows, Shape::kTokens>(args, blockIdx.x, kGroup,
                                         [&](const Piece& piece) { many_tile<T, Shape, kWide>(args.launch, piece); });
}

template <class T, class Shape, bool kWide>
void launch_many(const Grouped& args, Stream stream) {
  const int64_t blocks = row_tiles<Shape::kRows>(args.launch) * most_tiles<Shape::kTokens>(args);
  launch(many_kernel<T, Shape, kWide>, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kShared,
         stream, args);
}

__global__ void __launch_bounds__(kWarp * kFloatWarps) float_kernel(const Grouped args) {
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kFloatWarps + threadIdx.x / kWarp;
  for_tile<kFloatRows, kFloatTokens>(args, number, kGroupOfFew,
                                     [&](const Piece& piece) { float_tile(args.launch, piece); });
}

// The host knows no more than how many rows an expert has on average. Tiles have room for about twice as many, so that
// most experts' weights are read by one block; one that has more rows is as right, and its weights come from the cache.
template <class T>
void start(const Grouped& args, bool wide, Stream stream) {
  const int64_t mean = divide_up(args.launch.tokens, args.experts);
  if (!wide) {
    if (mean <= 8) {
      launch_few<T, 1, 1, false>(args, stream);
    } else {
      launch_many<T, Small, false>(args, stream);
    }
  } else if (mean <= 4) {
    launch_few<T, 1, 3, true>(args, stream);
  } else if (mean <= 8) {
    launch_few<T, 2, 2, true>(args, stream);
  } else if (mean <= 16) {
    launch_many<T, Flat, true>(args, stream);
  } else if (mean <= 40) {
    launch_many<T, Middle, true>(args, stream);
  } else {
    launch_many<T, Large, true>(args, stream);
  }
}

template <>
void start<float>(const Grouped& args, bool, Stream stream) {
  const int64_t tiles = row_tiles<kFloatRows>(args.launch) * most_tiles<kFloatTokens>(args);
  launch(float_kernel, dim3(static_cast<unsigned>(divide_up(tiles, kFloatWarps))), dim3(kWarp * kFloatWarps), 0, stream,
         args);
}

}  // namespace

void grouped_linear(const GroupedLinearArgs& args, const GroupedSizes& sizes, Stream stream) {
  if (args.rows == 0) return;
  Grouped some{};
  Launch& shared = some.launch;
  shared.x = args.x, shared.y = args.y;
  shared.tokens = static_cast<int>(args.rows), shared.features = static_cast<int>(args.features);
  shared.x_stride = args.x_stride;
  some.starts = args.starts;
  some.experts = static_cast<int>(args.experts), some.weights_each = static_cast<int>(args.count);
  for (int64_t i = 0; i < args.count; ++i) shared.columns += sizes.weight_rows[i];
  const bool wide =
      sizes.aligned && args.features % 8 == 0 && (args.x_stride % 8 == 0 || args.rows == 1) && are_aligned(args.x);
  int64_t column = 0;
  for (int64_t i = 0; i < args.count;) {
    some.weights = args.weights + i;
    for (shared.count = 0; i < args.count && shared.count < kMostWeights; ++i) {
      shared.products[shared.count++] = {nullptr, nullptr, sizes.weight_rows[i], column};
      column += sizes.weight_rows[i];
    }
    for_dtype(args.dtype, [&](auto zero) { start<decltype(zero)>(some, wide, stream); });
  }
}

}  // namespace quire::cuda

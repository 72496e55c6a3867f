// The tiles of experts' products: which expert's rows, and which of its weights', a block works on.
//
// How many rows an expert has stands on the device: a grid has as many blocks as any routing can need. A block looks
// for its tile among those of all experts' rows, none of which is filled up, and ends where there is none.
#pragma once

#include <algorithm>

#include "cuda/linear/tiles.h"

namespace quire::cuda {

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
  make(Piece{product, place.row, first + spot.across * kTokens, end, place.product});
}

// As many tiles of kTokens rows as any routing makes.
template <int kTokens>
int64_t most_tiles(const Grouped& args) {
  const int64_t rows = args.launch.tokens, with_rows = std::min<int64_t>(rows, args.experts);
  return (rows + with_rows * (kTokens - 1)) / kTokens;
}

}  // namespace quire::cuda

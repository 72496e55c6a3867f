// Which rows a block of the LoRA kernels works on. The segments lie on the device: each block looks for its own tile.
#pragma once

#include <algorithm>

#include "cuda/common/kernels.h"

namespace quire::cuda {

struct Range {
  int64_t segment;
  int first, count;  // rows
};

__device__ __forceinline__ bool same_rows(const LoraSegment& a, const LoraSegment& b) {
  return a.start == b.start && a.end == b.end;
}

// Cuts the rows of every segment in tiles of kTokens and finds the one of this number. kRuns: segments that name the
// same rows are taken as one, and the first is found. The whole warp asks, and learns the same.
template <int kTokens, bool kRuns>
__device__ bool find_range(const LoraArgs& args, int tile, Range& range) {
  constexpr int kEach = 4;  // segments of a lane
  const int lane = threadIdx.x % kWarp;
  const auto rows_of = [&](int64_t s, int64_t& first) {
    first = max(args.segments[s].start, int64_t{0});
    return min(args.segments[s].end, args.tokens) - first;
  };
  for (int64_t base = 0; base < args.num_segments; base += kWarp * kEach) {
    int tiles[kEach], own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t s = base + lane * kEach + i;
      int64_t first, rows = s < args.num_segments ? rows_of(s, first) : 0;
      if (kRuns && rows > 0 && s > 0 && same_rows(args.segments[s], args.segments[s - 1])) rows = 0;
      tiles[i] = rows > 0 ? static_cast<int>(divide_up(rows, kTokens)) : 0;
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
    int within = tile - before, place = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (place != i || within < tiles[i]) continue;
      within -= tiles[i];
      ++place;
    }
    const int owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, tile >= before && tile < before + own))) - 1;
    range.segment = base + owner * kEach + __shfl_sync(kAllLanes, place, owner);
    within = __shfl_sync(kAllLanes, within, owner) * kTokens;
    int64_t first;
    const int64_t rows = rows_of(range.segment, first);
    range.first = static_cast<int>(first) + within;
    range.count = static_cast<int>(min(rows - within, int64_t{kTokens}));
    return true;
  }
  return false;
}

// As many as `find_range` can find: rows are named by one run of at most `layers` segments.
template <int kTokens, bool kRuns>
unsigned most_ranges(const LoraArgs& args) {
  const int64_t rows = args.tokens * (kRuns ? 1 : args.layers), segments = args.num_segments;
  return static_cast<unsigned>(std::min({rows, segments + rows / kTokens, segments * divide_up(args.tokens, kTokens)}));
}

// The adapter in a slot; null where there is none.
__device__ __forceinline__ const LoraEntry* entry_of(const LoraTarget& target, int64_t slot) {
  return target.entries && slot >= 0 && slot < target.slots ? target.entries + slot : nullptr;
}

// The k's that `hidden` has room for.
__device__ __forceinline__ int rank_of(const LoraArgs& args, const LoraEntry& entry) {
  return static_cast<int>(min(entry.rank, args.max_rank));
}

template <class T>
__device__ __forceinline__ bool is_aligned(const T* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<unsigned>(bytes) == 0;
}

__device__ __forceinline__ float* hidden_of(const LoraArgs& args, int64_t target, int64_t layer, int64_t row) {
  return args.hidden + ((target * args.layers + layer) * args.tokens + row) * args.max_rank;
}

}  // namespace quire::cuda

// The one computation of a matrix product's element, y[t][n] = sum over k of x[t][k] w[n][k], that every kernel carries
// out whatever else it computes: so that an element's bits do not depend on how many tokens share the call.
//
// Half types: the k's, filled up with zeros to a multiple of 64, are cut in `parts_of` parts. A part is summed from
// zero by m16n8k16 products of 16 rows of w and 8 tokens, in order; then the parts are added, in order, in float. A run
// of 32 k's takes two of these products, and lane (g, t) of a warp gives them k = 8 t .. 8 t + 7 of its rows: the first
// its values 0..3, the second 4..7. Both operands are spread alike, so each k meets its own, and a lane's share of a
// run is 16 bytes in a row.
//
// float: lane l of a warp sums k = l, l + 32, ..., then a fixed tree adds the lanes.
#pragma once

#include "cuda/common/vectors.h"

namespace quire::cuda {

constexpr int kRun = 32;
constexpr int kUnit = 64;  // k's that a kernel takes at a time
constexpr int kMostParts = 8;

__host__ __device__ constexpr int parts_of(int64_t features) {
  return features >= 2048 ? kMostParts : features >= 512 ? 4 : features >= 128 ? 2 : 1;
}
__host__ __device__ constexpr int units_of(int64_t features) { return static_cast<int>(divide_up(features, kUnit)); }
// The unit at which a part starts; the part before it ends there.
__host__ __device__ constexpr int part_start(int units, int parts, int part) {
  return static_cast<int>(static_cast<int64_t>(units) * part / parts);
}

// A matrix, or the part of one that a block works on.
template <class T>
struct Rows {
  const T* data;
  int64_t stride;
  int count;
};

// Row `row`, or the last one: what is computed of rows that do not exist is thrown away.
template <class T>
__device__ __forceinline__ const T* row_of(const Rows<T>& rows, int row) {
  return rows.data + static_cast<int64_t>(min(row, rows.count - 1)) * rows.stride;
}

// Values k .. k + 7 of a row, zeros from `features` on. kWide: in one piece, which needs aligned rows and `features` a
// multiple of 8. kOnce: nobody reads them again soon.
template <bool kWide, bool kOnce, class T>
__device__ __forceinline__ uint4 load_eight(const T* row, int k, int features) {
  if constexpr (kWide) {
    uint4 words = make_uint4(0, 0, 0, 0);
    if (k < features) {
      if constexpr (kOnce) {
        words = load_once16(row + k);
      } else {
        words = *reinterpret_cast<const uint4*>(row + k);
      }
    }
    return words;
  } else {
    Vector<T> vector;
#pragma unroll
    for (int i = 0; i < 8; ++i) vector.values[i].bits = k + i < features ? row[k + i].bits : uint16_t{0};
    return vector.words;
  }
}

// A matrix w whose rows are T's. What a kernel reads w by: a lane's share of a unit is its eight k's of each of two runs,
// on their way from `fetch` on and looked at by `values` alone. (quantized/rows.h has rows of bytes behind the same names.)
template <class T, bool kWide>
struct PlainRows {
  static constexpr bool kPlain = true;  // what lies there is what is multiplied
  using Row = const T*;
  struct Share {
    uint4 runs[2];
  };
  const Rows<T>& rows;

  __device__ __forceinline__ int count() const { return rows.count; }
  __device__ __forceinline__ Row row(int number) const { return row_of(rows, number); }
  __device__ __forceinline__ void fetch(Share& share, Row row, int unit, int run, int t, int features) const {
    share.runs[run] = load_eight<kWide, true>(row, unit * kUnit + run * kRun + 8 * t, features);
  }
  __device__ __forceinline__ uint4 values(const Share& share, Row, int, int run, int, int) const {
    return share.runs[run];
  }
};

// One of a run's two products: the lane's shares of rows g (upper) and g + 8 (lower) and of token g.
template <class T, int kHalf>
__device__ __forceinline__ void multiply_half(float (&c)[4], const uint4& upper, const uint4& lower, const uint4& x) {
  if constexpr (kHalf == 0) {
    mma<T>(c, {upper.x, lower.x, upper.y, lower.y}, {x.x, x.y});
  } else {
    mma<T>(c, {upper.z, lower.z, upper.w, lower.w}, {x.z, x.w});
  }
}

// c += a run's product. One product's result is the next one's operand, so all first halves come before the second.
template <class T, int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void multiply_run(float (&c)[kRowTiles][kTokenTiles][4], const uint4 (&w)[kRowTiles][2],
                                             const uint4 (&x)[kTokenTiles]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) multiply_half<T, 0>(c[i][j], w[i][0], w[i][1], x[j]);
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) multiply_half<T, 1>(c[i][j], w[i][0], w[i][1], x[j]);
}

template <int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void clear(float (&c)[kRowTiles][kTokenTiles][4]) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[i][j][e] = 0;
}

// A tile of sums goes through shared memory as [token][row]. With 4 more than its rows between tokens, the lanes of a
// warp touch 32 different banks.
__host__ __device__ constexpr int padded(int rows) { return rows + 4; }

// A warp's sums of 16 kRowTiles rows and 8 kTokenTiles tokens to such a tile.
template <int kRowTiles, int kTokenTiles>
__device__ __forceinline__ void spill(const float (&c)[kRowTiles][kTokenTiles][4], float* tile, int stride) {
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[(8 * j + 2 * t + e % 2) * stride + 16 * i + g + 8 * (e / 2)] = c[i][j][e];
}

// One part's sums, by one warp. It has kDepth units of w on their way at any time, straight to registers.
// kWide: of x.
template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide, class Source>
__device__ __forceinline__ void sum_part(float (&c)[kRowTiles][kTokenTiles][4], const Source& w, const Rows<T>& x,
                                         int features, int first, int last) {
  // A few tokens come along with w; more would take too many registers, and are soon read again by other blocks.
  constexpr bool kAhead = kTokenTiles <= 2;
  constexpr int kAheadTiles = kAhead ? kTokenTiles : 1;
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  typename Source::Row w_rows[kRowTiles][2];
  const T* x_rows[kTokenTiles];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) w_rows[i][h] = w.row(16 * i + 8 * h + g);
#pragma unroll
  for (int j = 0; j < kTokenTiles; ++j) x_rows[j] = row_of(x, 8 * j + g);

  typename Source::Share w_ring[kDepth][kRowTiles][2];
  uint4 x_ring[kDepth][2][kAheadTiles];
  const auto fetch = [&](int slot, int unit) {
    if (unit >= last) return;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const int k = unit * kUnit + run * kRun + 8 * t;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) w.fetch(w_ring[slot][i][h], w_rows[i][h], unit, run, t, features);
      if constexpr (kAhead) {
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) x_ring[slot][run][j] = load_eight<kWide, false>(x_rows[j], k, features);
      }
    }
  };
#pragma unroll
  for (int slot = 0; slot < kDepth; ++slot) fetch(slot, first + slot);
  for (int start = first; start < last; start += kDepth) {
#pragma unroll
    for (int slot = 0; slot < kDepth; ++slot) {
      const int unit = start + slot;
      if (unit >= last) break;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        uint4 w_run[kRowTiles][2];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) w_run[i][h] = w.values(w_ring[slot][i][h], w_rows[i][h], unit, run, t, features);
        if constexpr (kAhead) {
          multiply_run<T>(c, w_run, x_ring[slot][run]);
        } else {
          uint4 tokens[kTokenTiles];
#pragma unroll
          for (int j = 0; j < kTokenTiles; ++j)
            tokens[j] = load_eight<kWide, false>(x_rows[j], unit * kUnit + run * kRun + 8 * t, features);
          multiply_run<T>(c, w_run, tokens);
        }
      }
      fetch(slot, unit + kDepth);
    }
  }
}

// What `product_of_few` needs of dynamic shared memory.
template <int kRowTiles, int kTokenTiles>
constexpr size_t shared_of_few(int parts) {
  return sizeof(float) * static_cast<size_t>(parts) * 8 * kTokenTiles * padded(16 * kRowTiles);
}

// The products of up to 16 kRowTiles rows and 8 kTokenTiles tokens, by a block of `parts_of` warps: a part each.
// Calls finish(row, token, sum) once for each.
template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide, class Source, class Finish>
__device__ __forceinline__ void product_of_few(const Source& w, const Rows<T>& x, int features, const Finish& finish) {
  constexpr int kRows = 16 * kRowTiles, kStride = padded(kRows), kTile = 8 * kTokenTiles * kStride;
  const int parts = parts_of(features), units = units_of(features), warp = threadIdx.x / kWarp;
  float* tiles = reinterpret_cast<float*>(dynamic_shared());
  float c[kRowTiles][kTokenTiles][4];
  clear(c);
  sum_part<T, kRowTiles, kTokenTiles, kDepth, kWide>(c, w, x, features, part_start(units, parts, warp),
                                                     part_start(units, parts, warp + 1));
  spill(c, tiles + warp * kTile, kStride);
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * x.count; i += blockDim.x) {
    const int row = i % kRows, token = i / kRows;
    if (row >= w.count()) continue;
    float total = 0;
    for (int part = 0; part < parts; ++part) total += tiles[part * kTile + token * kStride + row];
    finish(row, token, total);
  }
}

constexpr int kFloatRows = 4, kFloatTokens = 8;

// Adds the lanes' sums; a lane finishes one element.
template <class Finish>
__device__ __forceinline__ void finish_floats(const float (&sums)[kFloatRows][kFloatTokens], int rows, int tokens,
                                              const Finish& finish) {
  const int lane = threadIdx.x % kWarp;
  float own = 0;
#pragma unroll
  for (int i = 0; i < kFloatRows; ++i)
#pragma unroll
    for (int j = 0; j < kFloatTokens; ++j) {
      const float sum = warp_sum(sums[i][j]);
      if (lane == i * kFloatTokens + j) own = sum;
    }
  const int row = lane / kFloatTokens, token = lane % kFloatTokens;
  if (row < rows && token < tokens) finish(row, token, own);
}
static_assert(kFloatRows * kFloatTokens == kWarp);

// The same for float, of up to kFloatRows rows and kFloatTokens tokens by one warp.
template <class Finish>
__device__ __forceinline__ void product_of_floats(const Rows<float>& w, const Rows<float>& x, int features,
                                                  const Finish& finish) {
  const int lane = threadIdx.x % kWarp;
  float sums[kFloatRows][kFloatTokens] = {};
  for (int k = lane; k < features; k += kWarp) {
    float row_values[kFloatRows];
#pragma unroll
    for (int i = 0; i < kFloatRows; ++i) row_values[i] = row_of(w, i)[k];
#pragma unroll
    for (int j = 0; j < kFloatTokens; ++j) {
      if (j >= x.count) break;
      const float value = x.data[j * x.stride + k];
#pragma unroll
      for (int i = 0; i < kFloatRows; ++i) sums[i][j] = fmaf(row_values[i], value, sums[i][j]);
    }
  }
  finish_floats(sums, w.count, x.count, finish);
}

}  // namespace quire::cuda

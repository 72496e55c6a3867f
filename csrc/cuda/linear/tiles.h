// A block's tile of y = x W^T + bias, by product.h's computation: of few tokens, of many, of floats. None of it shows in
// the bits. Who calls says which weight, which of its rows and which tokens: `linear` has the same tokens for every
// weight, `grouped_linear` an expert's own.
//
// Few tokens: reading W takes all the time. A block has 16 or 32 of its rows and a warp for each part of the k's, so
// that even the rows of a small matrix keep all of the GPU's memory busy. Many tokens: tiles of W and x go through
// shared memory, several steps ahead, and a block walks the parts one after the other.
#pragma once

#include <algorithm>

#include "cuda/common/kernels.h"
#include "cuda/linear/product.h"

namespace quire::cuda {

constexpr int kMostWeights = 8;  // in one launch

struct Product {
  const void* data;
  const void* bias;
  int64_t rows, first;  // its first column of y
};

struct Launch {
  const void* x;
  void* y;
  Product products[kMostWeights];
  int count, tokens, features;
  int64_t x_stride, columns;
  bool float_out;
};

// Tiles of kRows rows, of all weights.
template <int kRows>
__host__ __device__ __forceinline__ int64_t row_tiles(const Launch& args) {
  int64_t tiles = 0;
  for (int i = 0; i < args.count; ++i) tiles += divide_up(args.products[i].rows, kRows);
  return tiles;
}

// Where the tile'th of them lies.
struct Place {
  int product;
  int64_t row;
};
template <int kRows>
__device__ __forceinline__ Place place_of(const Launch& args, int64_t tile) {
  int i = 0;
  while (i + 1 < args.count) {
    const int64_t tiles = divide_up(args.products[i].rows, kRows);
    if (tile < tiles) break;
    tile -= tiles;
    ++i;
  }
  return {i, tile * kRows};
}

// Bias and rounding.
template <class T>
__device__ __forceinline__ float add_bias(const Product& product, int64_t row, float sum) {
  return product.bias ? sum + to_float(static_cast<const T*>(product.bias)[row]) : sum;
}
template <class T>
__device__ __forceinline__ void write(const Launch& args, const Product& product, int64_t token, int64_t row,
                                      float sum) {
  const int64_t place = token * args.columns + product.first + row;
  sum = add_bias<T>(product, row, sum);
  if (args.float_out) {
    static_cast<float*>(args.y)[place] = sum;
  } else {
    static_cast<T*>(args.y)[place] = from_float<T>(sum);
  }
}

template <class T>
__device__ __forceinline__ Rows<T> rows_from(const void* data, int64_t stride, int64_t first, int64_t rows, int most) {
  return {static_cast<const T*>(data) + first * stride, stride, static_cast<int>(min(rows - first, int64_t{most}))};
}

// The part of a product that a block makes: from a row of the weight on, of the tokens first .. end. number: which of
// the launch's weights it is.
struct Piece {
  const Product& product;
  int64_t row, first, end;
  int number = 0;
};

// Starts the products of rows of T's; the kernels are linear.cu's. wide: whether all of x and w is aligned, and
// `features` is a multiple of 8.
void start_products(const Launch& args, DType dtype, bool wide, Stream stream);

// -- few tokens ------------------------------------------------------------------------------------------------------

// Blocks that fit a multiprocessor at once, by their registers.
constexpr int blocks_at_once(int token_tiles) { return token_tiles <= 2 ? 2 : 1; }

template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide, class Source>
__device__ __forceinline__ void few_tile(const Launch& args, const Piece& piece, const Source& w) {
  const auto x = rows_from<T>(args.x, args.x_stride, piece.first, piece.end, 8 * kTokenTiles);
  product_of_few<T, kRowTiles, kTokenTiles, kDepth, kWide>(w, x, args.features, [&](int row, int token, float sum) {
    write<T>(args, piece.product, piece.first + token, piece.row + row, sum);
  });
}
template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide>
__device__ __forceinline__ void few_tile(const Launch& args, const Piece& piece) {
  const auto w = rows_from<T>(piece.product.data, args.features, piece.row, piece.product.rows, 16 * kRowTiles);
  few_tile<T, kRowTiles, kTokenTiles, kDepth, kWide>(args, piece, PlainRows<T, kWide>{w});
}

// -- many tokens -----------------------------------------------------------------------------------------------------

// A block's tile: kRows rows and kTokens tokens, by kWarpsDown x kWarpsAcross warps. A step is one unit of 64 k's, of
// which kSteps are in shared memory or on their way there.
template <int kRows_, int kTokens_, int kWarpsDown_, int kWarpsAcross_, int kSteps_>
struct Tile {
  static constexpr int kRows = kRows_, kTokens = kTokens_, kWarpsDown = kWarpsDown_, kWarpsAcross = kWarpsAcross_;
  static constexpr int kSteps = kSteps_, kThreads = kWarp * kWarpsDown * kWarpsAcross;
  static constexpr int kRowTiles = kRows / kWarpsDown / 16, kTokenTiles = kTokens / kWarpsAcross / 8;  // of a warp
  static constexpr int kStep = (kRows + kTokens) * kUnit;                                              // elements
  static constexpr size_t kShared = std::max(size_t{2} * kStep * kSteps, sizeof(float) * kTokens * padded(kRows));
};
using Large = Tile<128, 128, 2, 4, 4>;
using Middle = Tile<128, 64, 4, 2, 4>;
using Flat = Tile<128, 32, 4, 1, 5>;
using Small = Tile<64, 64, 2, 2, 6>;

// Copies a step's k's of kRows rows to `shared`, [run][row][32]: so the 16 bytes that 8 lanes of a warp read lie in 128
// in a row. 16 threads copy two rows' 128 bytes, and 8 of them write 128 in a row too.
template <class T, int kRows, int kThreads, bool kWide>
__device__ __forceinline__ void copy_step(T* shared, const Rows<T>& rows, int unit, int features) {
  static_assert(kRows * 8 % kThreads == 0);
  const int run = threadIdx.x / 8 % 2, t = threadIdx.x % 4, start = threadIdx.x / 16 * 2 + threadIdx.x / 4 % 2;
  const int k = unit * kUnit + run * kRun + 8 * t;
  const T* from = rows.data + start * rows.stride + k;
  T* to = shared + (run * kRows + start) * kRun + 8 * t;
#pragma unroll
  for (int i = 0; i < kRows * 8 / kThreads; ++i) {
    constexpr int kApart = kThreads / 8;
    const bool exists = start + i * kApart < rows.count;
    const T* row = from + i * kApart * rows.stride;
    if constexpr (kWide) {
      copy_async16(to + i * kApart * kRun, row, exists && k < features);
    } else {
      *reinterpret_cast<uint4*>(to + i * kApart * kRun) = load_eight<false, false>(row, 0, exists ? features - k : 0);
    }
  }
}

// The same of rows that must become T's first: a thread has a step's bytes of its shares on their way while it stores
// the ones before.
template <class T, int kRows, int kThreads, class Source>
struct UnpackStep {
  static constexpr int kShares = kRows * 4 / kThreads;  // four lanes' shares of a row
  static_assert(kRows * 4 % kThreads == 0);
  typename Source::Share shares[kShares];

  __device__ __forceinline__ void fetch(const Source& w, int unit, int features) {
    if constexpr (!Source::kPlain) {
#pragma unroll
      for (int i = 0; i < kShares; ++i)
#pragma unroll
        for (int run = 0; run < 2; ++run) w.fetch(shares[i], w.row(row(i)), unit, run, threadIdx.x % 4, features);
    }
  }
  __device__ __forceinline__ void store(T* shared, const Source& w, int unit, int features) const {
#pragma unroll
    for (int i = 0; i < kShares; ++i)
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const int t = threadIdx.x % 4;
        *reinterpret_cast<uint4*>(shared + (run * kRows + row(i)) * kRun + 8 * t) =
            w.values(shares[i], w.row(row(i)), unit, run, t, features);
      }
  }

 private:
  static __device__ __forceinline__ int row(int share) { return threadIdx.x / 4 + share * (kThreads / 4); }
};

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, class Shape, bool kWide, class Source>
__device__ __forceinline__ void many_tile(const Launch& args, const Piece& piece, const Source& w) {
  constexpr int kRows = Shape::kRows, kTokens = Shape::kTokens, kSteps = Shape::kSteps;
  constexpr int kRowTiles = Shape::kRowTiles, kTokenTiles = Shape::kTokenTiles;
  const Product& product = piece.product;
  const int64_t first = piece.first;
  const auto x = rows_from<T>(args.x, args.x_stride, first, piece.end, kTokens);

  T* steps = reinterpret_cast<T*>(dynamic_shared());
  const int units = units_of(args.features), parts = parts_of(args.features);
  UnpackStep<T, kRows, Shape::kThreads, Source> unpack;
  unpack.fetch(w, 0, args.features);
  const auto fetch = [&](int unit) {
    if (unit < units) {
      T* step = steps + unit % kSteps * Shape::kStep;
      if constexpr (Source::kPlain) {
        copy_step<T, kRows, Shape::kThreads, kWide>(step, w.rows, unit, args.features);
      } else {
        unpack.store(step, w, unit, args.features);
        unpack.fetch(w, unit + 1, args.features);
      }
      copy_step<T, kTokens, Shape::kThreads, kWide>(step + kRows * kUnit, x, unit, args.features);
    }
    copy_async_commit();
  };
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, g = lane / 4, t = lane % 4;
  const int warp_row = warp / Shape::kWarpsAcross * 16 * kRowTiles;
  const int warp_token = warp % Shape::kWarpsAcross * 8 * kTokenTiles;

  float sums[kRowTiles][kTokenTiles][4], totals[kRowTiles][kTokenTiles][4];
  clear(sums);
  clear(totals);
  for (int unit = 0; unit < kSteps - 1; ++unit) fetch(unit);
  for (int part = 0, unit = 0; part < parts; ++part) {
    for (const int end = part_start(units, parts, part + 1); unit < end; ++unit) {
      copy_async_wait<kSteps - 2>();
      __syncthreads();  // this step is there, and nobody reads the one before any more
      const T* step = steps + unit % kSteps * Shape::kStep + 8 * t;
#pragma unroll
      for (int run = 0; run < 2; ++run) {
        const T* w_step = step + (run * kRows + warp_row + g) * kRun;
        const T* x_step = step + kRows * kUnit + (run * kTokens + warp_token + g) * kRun;
        uint4 w_run[kRowTiles][2], x_run[kTokenTiles];
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) w_run[i][h] = *reinterpret_cast<const uint4*>(w_step + (16 * i + 8 * h) * kRun);
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) x_run[j] = *reinterpret_cast<const uint4*>(x_step + 8 * j * kRun);
        if (run == 0) fetch(unit + kSteps - 1);  // while the first operands come
        multiply_run<T>(sums, w_run, x_run);
      }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) totals[i][j][e] += sums[i][j][e];
    clear(sums);
  }

  // Through shared memory, so that rows of y are written 8 values at a time.
  constexpr int kStride = padded(kRows);
  float* tile = reinterpret_cast<float*>(dynamic_shared());
  copy_async_wait<0>();
  __syncthreads();
  spill(totals, tile + warp_token * kStride + warp_row, kStride);
  __syncthreads();
  const bool whole = args.columns % 8 == 0 && product.first % 8 == 0 && reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
  for (int i = threadIdx.x; i < kRows / 8 * x.count; i += Shape::kThreads) {
    const int row = i % (kRows / 8) * 8, token = i / (kRows / 8);
    const float* from = tile + token * kStride + row;
    if (args.float_out || !whole || row + 8 > w.count()) {
      for (int e = 0; e < 8 && row + e < w.count(); ++e)
        write<T>(args, product, first + token, piece.row + row + e, from[e]);
    } else {
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = add_bias<T>(product, piece.row + row + e, from[e]);
      store<8>(static_cast<T*>(args.y) + (first + token) * args.columns + product.first + piece.row + row, values);
    }
  }
}

template <class T, class Shape, bool kWide>
__device__ __forceinline__ void many_tile(const Launch& args, const Piece& piece) {
  const auto w = rows_from<T>(piece.product.data, args.features, piece.row, piece.product.rows, Shape::kRows);
  many_tile<T, Shape, kWide>(args, piece, PlainRows<T, kWide>{w});
}

// Where a block's tile lies among `down` tiles of rows and `across` of tokens: blocks that run at the same time have
// `group` tiles of rows in common, and each all tokens before the next group.
struct Spot {
  int64_t down, across;
};
__device__ __forceinline__ Spot spot_of(int64_t block, int64_t down, int64_t across, int64_t group) {
  const int64_t first = block / (group * across) * group, within = block % (group * across);
  const int64_t height = min(down - first, group);
  return {first + within % height, within / height};
}
constexpr int64_t kGroup = 16;

// -- float -----------------------------------------------------------------------------------------------------------

constexpr int kFloatWarps = 8;  // of a block, a tile each

__device__ __forceinline__ void float_tile(const Launch& args, const Piece& piece) {
  const auto w = rows_from<float>(piece.product.data, args.features, piece.row, piece.product.rows, kFloatRows);
  const auto x = rows_from<float>(args.x, args.x_stride, piece.first, piece.end, kFloatTokens);
  product_of_floats(w, x, args.features, [&](int row, int token, float sum) {
    write<float>(args, piece.product, piece.first + token, piece.row + row, sum);
  });
}

}  // namespace quire::cuda

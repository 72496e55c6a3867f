// y = x W^T + bias for several weights in one launch. product.h says how an element is made; here are the ways to share
// the work out, none of which shows in the bits.
//
// Few tokens: reading W takes all the time. A block has 16 or 32 of its rows and a warp for each part of the k's, so
// that even the rows of a small matrix keep all of the GPU's memory busy. Many tokens: tiles of W and x go through
// shared memory, several steps ahead, and a block walks the parts one after the other.
#include <algorithm>

#include "cuda/common/kernels.h"
#include "cuda/linear/product.h"

namespace quire::cuda {
namespace {

constexpr int kMostWeights = 8;  // in one launch
// Blocks that are enough to spread over a GPU. The emulated one is small, for small matrices to come by every kernel.
#ifdef QUIRE_CUDA_EMULATION
constexpr int64_t kEnoughBlocks = 3;
#else
constexpr int64_t kEnoughBlocks = 96;
#endif

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

// -- few tokens ------------------------------------------------------------------------------------------------------

// Blocks that fit a multiprocessor at once, by their registers.
constexpr int blocks_at_once(int token_tiles) { return token_tiles <= 2 ? 2 : 1; }

template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide>
__global__ void __launch_bounds__(kWarp * kMostParts, blocks_at_once(kTokenTiles)) few_kernel(
    const Launch args) {
  constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  const Place place = place_of<kRows>(args, blockIdx.x);
  const Product& product = args.products[place.product];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kTokens;
  const auto w = rows_from<T>(product.data, args.features, place.row, product.rows, kRows);
  const auto x = rows_from<T>(args.x, args.x_stride, first, args.tokens, kTokens);
  product_of_few<T, kRowTiles, kTokenTiles, kDepth, kWide>(w, x, args.features, [&](int row, int token, float sum) {
    write<T>(args, product, first + token, place.row + row, sum);
  });
}

template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide>
void launch_few(const Launch& args, Stream stream) {
  const int parts = parts_of(args.features);
  const dim3 grid(static_cast<unsigned>(row_tiles<16 * kRowTiles>(args)),
                  static_cast<unsigned>(divide_up(args.tokens, 8 * kTokenTiles)));
  launch(few_kernel<T, kRowTiles, kTokenTiles, kDepth, kWide>, grid, dim3(static_cast<unsigned>(kWarp * parts)),
         shared_of_few<kRowTiles, kTokenTiles>(parts), stream, args);
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

// Not cut into functions: its fragments live in registers over all steps, and a step's copies, products and barriers
// belong together.
template <class T, class Shape, bool kWide>
__global__ void __launch_bounds__(Shape::kThreads) many_kernel(const Launch args, int group) {
  constexpr int kRows = Shape::kRows, kTokens = Shape::kTokens, kSteps = Shape::kSteps;
  constexpr int kRowTiles = Shape::kRowTiles, kTokenTiles = Shape::kTokenTiles;
  // Blocks that run at the same time have `group` tiles of rows in common, and each all tokens before the next group.
  const int64_t down = row_tiles<kRows>(args), across = divide_up(args.tokens, kTokens);
  const int64_t first_tile = blockIdx.x / (group * across) * group, within = blockIdx.x % (group * across);
  const int64_t height = min(down - first_tile, static_cast<int64_t>(group));
  const Place place = place_of<kRows>(args, first_tile + within % height);
  const int64_t first = within / height * kTokens;
  const Product& product = args.products[place.product];
  const auto w = rows_from<T>(product.data, args.features, place.row, product.rows, kRows);
  const auto x = rows_from<T>(args.x, args.x_stride, first, args.tokens, kTokens);

  T* steps = reinterpret_cast<T*>(dynamic_shared());
  const int units = units_of(args.features), parts = parts_of(args.features);
  const auto fetch = [&](int unit) {
    if (unit < units) {
      T* step = steps + unit % kSteps * Shape::kStep;
      copy_step<T, kRows, Shape::kThreads, kWide>(step, w, unit, args.features);
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
    if (args.float_out || !whole || row + 8 > w.count) {
      for (int e = 0; e < 8 && row + e < w.count; ++e)
        write<T>(args, product, first + token, place.row + row + e, from[e]);
    } else {
      float values[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) values[e] = add_bias<T>(product, place.row + row + e, from[e]);
      store<8>(static_cast<T*>(args.y) + (first + token) * args.columns + product.first + place.row + row, values);
    }
  }
}

template <class T, class Shape, bool kWide>
void launch_many(const Launch& args, Stream stream) {
  constexpr int kGroup = 16;
  const int64_t blocks = row_tiles<Shape::kRows>(args) * divide_up(args.tokens, Shape::kTokens);
  launch(many_kernel<T, Shape, kWide>, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kShared,
         stream, args, kGroup);
}

// -- which -----------------------------------------------------------------------------------------------------------

template <class T>
void start(const Launch& args, bool wide, Stream stream) {
  const int64_t tiles = row_tiles<128>(args);
  if (!wide) {
    if (args.tokens <= 8) {
      launch_few<T, 1, 1, 1, false>(args, stream);
    } else {
      launch_many<T, Small, false>(args, stream);
    }
  } else if (args.tokens <= 8) {
    launch_few<T, 1, 1, 3, true>(args, stream);
  } else if (args.tokens <= 16) {
    launch_few<T, 1, 2, 2, true>(args, stream);
  } else if (args.tokens <= 32) {
    // As many tokens as rows: x is read as often as W, so tall tiles are better where there are enough of them.
    tiles < kEnoughBlocks ? launch_few<T, 2, 4, 2, true>(args, stream) : launch_many<T, Flat, true>(args, stream);
  } else if (args.tokens <= 64) {
    tiles < kEnoughBlocks ? launch_few<T, 2, 8, 2, true>(args, stream) : launch_many<T, Middle, true>(args, stream);
  } else if (tiles * divide_up(args.tokens, 128) < kEnoughBlocks) {
    launch_many<T, Small, true>(args, stream);
  } else {
    launch_many<T, Large, true>(args, stream);
  }
}

constexpr int kFloatWarps = 8;

__global__ void __launch_bounds__(kWarp * kFloatWarps) float_kernel(const Launch args) {
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kFloatWarps + threadIdx.x / kWarp;
  if (tile >= row_tiles<kFloatRows>(args)) return;
  const Place place = place_of<kFloatRows>(args, tile);
  const Product& product = args.products[place.product];
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kFloatTokens;
  const auto w = rows_from<float>(product.data, args.features, place.row, product.rows, kFloatRows);
  const auto x = rows_from<float>(args.x, args.x_stride, first, args.tokens, kFloatTokens);
  product_of_floats(w, x, args.features, [&](int row, int token, float sum) {
    write<float>(args, product, first + token, place.row + row, sum);
  });
}

template <>
void start<float>(const Launch& args, bool, Stream stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(row_tiles<kFloatRows>(args), kFloatWarps)),
                  static_cast<unsigned>(divide_up(args.tokens, kFloatTokens)));
  launch(float_kernel, grid, dim3(kWarp * kFloatWarps), 0, stream, args);
}

}  // namespace

void linear(const LinearArgs& args, Stream stream) {
  if (args.tokens == 0) return;
  Launch some{};
  some.x = args.x, some.y = args.y;
  some.tokens = static_cast<int>(args.tokens), some.features = static_cast<int>(args.features);
  some.x_stride = args.x_stride;
  some.float_out = args.out_dtype == DType::float32;
  for (int64_t i = 0; i < args.count; ++i) some.columns += args.weights[i].rows;
  int64_t column = 0;
  for (int64_t i = 0; i < args.count;) {
    // 16 bytes at a time; one row's stride is nobody's step.
    bool wide = args.features % 8 == 0 && (args.x_stride % 8 == 0 || args.tokens == 1) && are_aligned(args.x);
    for (some.count = 0; i < args.count && some.count < kMostWeights; ++i) {
      const Weight& weight = args.weights[i];
      if (weight.rows == 0) continue;
      some.products[some.count++] = {weight.data, weight.bias, weight.rows, column};
      wide &= are_aligned(weight.data);
      column += weight.rows;
    }
    for_dtype(args.dtype, [&](auto zero) { start<decltype(zero)>(some, wide, stream); });
  }
}

}  // namespace quire::cuda

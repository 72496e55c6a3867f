// y = x W^T + bias for several weights in one launch. product.h says how an element is made, tiles.h how a block makes
// many; here are the ways to share the work out, none of which shows in the bits.
#include "cuda/linear/tiles.h"

namespace quire::cuda {
namespace {

// Blocks that are enough to spread over a GPU. The emulated one is small, for small matrices to come by every kernel.
#ifdef QUIRE_CUDA_EMULATION
constexpr int64_t kEnoughBlocks = 3;
#else
constexpr int64_t kEnoughBlocks = 96;
#endif

template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide>
__global__ void __launch_bounds__(kWarp * kMostParts, blocks_at_once(kTokenTiles)) few_kernel(const Launch args) {
  const Place place = place_of<16 * kRowTiles>(args, blockIdx.x);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * 8 * kTokenTiles;
  few_tile<T, kRowTiles, kTokenTiles, kDepth, kWide>(args,
                                                     {args.products[place.product], place.row, first, args.tokens});
}

template <class T, int kRowTiles, int kTokenTiles, int kDepth, bool kWide>
void launch_few(const Launch& args, Stream stream) {
  const int parts = parts_of(args.features);
  const dim3 grid(static_cast<unsigned>(row_tiles<16 * kRowTiles>(args)),
                  static_cast<unsigned>(divide_up(args.tokens, 8 * kTokenTiles)));
  launch(few_kernel<T, kRowTiles, kTokenTiles, kDepth, kWide>, grid, dim3(static_cast<unsigned>(kWarp * parts)),
         shared_of_few<kRowTiles, kTokenTiles>(parts), stream, args);
}

template <class T, class Shape, bool kWide>
__global__ void __launch_bounds__(Shape::kThreads) many_kernel(const Launch args) {
  const int64_t down = row_tiles<Shape::kRows>(args), across = divide_up(args.tokens, Shape::kTokens);
  const Spot spot = spot_of(blockIdx.x, down, across, kGroup);
  const Place place = place_of<Shape::kRows>(args, spot.down);
  many_tile<T, Shape, kWide>(args,
                             {args.products[place.product], place.row, spot.across * Shape::kTokens, args.tokens});
}

template <class T, class Shape, bool kWide>
void launch_many(const Launch& args, Stream stream) {
  const int64_t blocks = row_tiles<Shape::kRows>(args) * divide_up(args.tokens, Shape::kTokens);
  launch(many_kernel<T, Shape, kWide>, dim3(static_cast<unsigned>(blocks)), dim3(Shape::kThreads), Shape::kShared,
         stream, args);
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

__global__ void __launch_bounds__(kWarp * kFloatWarps) float_kernel(const Launch args) {
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * kFloatWarps + threadIdx.x / kWarp;
  if (tile >= row_tiles<kFloatRows>(args)) return;
  const Place place = place_of<kFloatRows>(args, tile);
  const int64_t first = static_cast<int64_t>(blockIdx.y) * kFloatTokens;
  float_tile(args, {args.products[place.product], place.row, first, args.tokens});
}

template <>
void start<float>(const Launch& args, bool, Stream stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(row_tiles<kFloatRows>(args), kFloatWarps)),
                  static_cast<unsigned>(divide_up(args.tokens, kFloatTokens)));
  launch(float_kernel, grid, dim3(kWarp * kFloatWarps), 0, stream, args);
}

}  // namespace

void start_products(const Launch& args, DType dtype, bool wide, Stream stream) {
  for_dtype(dtype, [&](auto zero) { start<decltype(zero)>(args, wide, stream); });
}

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
    start_products(some, args.dtype, wide, stream);
  }
}

}  // namespace quire::cuda

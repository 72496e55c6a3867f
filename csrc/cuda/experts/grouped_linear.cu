// y = x W^T + b where each row of x has the weights of its own expert; rows come sorted by expert.
//
// Tiles are `linear`'s, so that a row has the bits that it has there; expert_tiles.h says who works on which.
#include "cuda/experts/expert_tiles.h"

namespace quire::cuda {
namespace {

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

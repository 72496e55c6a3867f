// What the kernels of quantized weights are given, and how a kind's are launched: for one weight after the other with the
// same tokens, as `linear`, or for experts', as `grouped_linear`.
#pragma once

#include "cuda/experts/expert_tiles.h"
#include "cuda/quantized/rows.h"

namespace quire::cuda {

// Weights of one kind. No experts: every token has all of launch.products.
struct QuantizedCall {
  Grouped grouped;
  RowsLayout layouts[kMostWeights];
};

// A tile of kTokens tokens to be made of a weight's rows.
struct Work {
  Product product;
  RowsLayout layout;
  int64_t row, first, end;
};

// Finds what the block, or the warp, of this number does. False: nothing.
template <int kRows, int kTokens>
__device__ __forceinline__ bool find_work(const QuantizedCall& args, int64_t number, int64_t group, Work& work) {
  const Launch& launch = args.grouped.launch;
  bool found = false;
  const auto take = [&](const Piece& piece) {
    found = true;
    work = {piece.product, args.layouts[piece.number], piece.row, piece.first, piece.end};
  };
  if (args.grouped.experts == 0) {
    const int64_t down = row_tiles<kRows>(launch), across = divide_up(launch.tokens, kTokens);
    if (number >= down * across) return false;
    const Spot spot = spot_of(number, down, across, group);
    const Place place = place_of<kRows>(launch, spot.down);
    take({launch.products[place.product], place.row, spot.across * kTokens, launch.tokens, place.product});
  } else {
    for_tile<kRows, kTokens>(args.grouped, number, group, take);
  }
  return found;
}

template <class T, class Kind>
__device__ __forceinline__ QuantizedRows<T, Kind> rows_of(const Work& work, int most) {
  const uint8_t* data = static_cast<const uint8_t*>(work.product.data) + work.row * work.layout.row_bytes;
  return {data, static_cast<int>(min(work.product.rows - work.row, int64_t{most})), work.layout};
}

// Tiles of kRows rows and kTokens tokens, at most.
template <int kRows, int kTokens>
unsigned most_blocks(const QuantizedCall& args) {
  const Grouped& grouped = args.grouped;
  const int64_t across = grouped.experts ? most_tiles<kTokens>(grouped) : divide_up(grouped.launch.tokens, kTokens);
  return static_cast<unsigned>(row_tiles<kRows>(grouped.launch) * across);
}

// Units of w on their way: as many as registers are left for, of two rows' shares, and of x's where these come along.
template <class Kind, int kTokenTiles>
__host__ __device__ constexpr int depth_of() {
  constexpr int kEach = static_cast<int>(sizeof(typename Kind::Share)) / 2 + (kTokenTiles <= 2 ? 8 * kTokenTiles : 0);
  constexpr int kDepth = (72 - Kind::kRegisters) / kEach;
  return kDepth < 1 ? 1 : kDepth > 3 ? 3 : kDepth;
}

template <class T, class Kind, int kTokenTiles>
__global__ void __launch_bounds__(kWarp * kMostParts, blocks_at_once(kTokenTiles)) few_kernel(
    const QuantizedCall args) {
  Work work;
  if (!find_work<16, 8 * kTokenTiles>(args, blockIdx.x, 1, work)) return;
  few_tile<T, 1, kTokenTiles, depth_of<Kind, kTokenTiles>(), true>(
      args.grouped.launch, {work.product, work.row, work.first, work.end}, rows_of<T, Kind>(work, 16));
}

template <class T, class Kind, int kTokenTiles>
void launch_few(const QuantizedCall& args, Stream stream) {
  const int parts = parts_of(args.grouped.launch.features);
  launch(few_kernel<T, Kind, kTokenTiles>, dim3(most_blocks<16, 8 * kTokenTiles>(args)),
         dim3(static_cast<unsigned>(kWarp * parts)), shared_of_few<1, kTokenTiles>(parts), stream, args);
}

using Unpacked = Tile<64, 64, 2, 2, 3>;

template <class T, class Kind>
__global__ void __launch_bounds__(Unpacked::kThreads) many_kernel(const QuantizedCall args) {
  Work work;
  if (!find_work<Unpacked::kRows, Unpacked::kTokens>(args, blockIdx.x, kGroup, work)) return;
  many_tile<T, Unpacked, true>(args.grouped.launch, {work.product, work.row, work.first, work.end},
                               rows_of<T, Kind>(work, Unpacked::kRows));
}

template <class T, class Kind>
void launch_kind(const QuantizedCall& args, Stream stream) {
  const Grouped& grouped = args.grouped;
  const int64_t tokens = grouped.launch.tokens, each = grouped.experts ? divide_up(tokens, grouped.experts) : tokens;
  // Experts: tiles have room for about twice the average, as grouped_linear.cu says.
  const int64_t room = grouped.experts ? 2 * each : each;
  if (room <= 8) {
    launch_few<T, Kind, 1>(args, stream);
  } else if (room <= 32) {
    launch_few<T, Kind, 4>(args, stream);
  } else {
    launch(many_kernel<T, Kind>, dim3(most_blocks<Unpacked::kRows, Unpacked::kTokens>(args)), dim3(Unpacked::kThreads),
           Unpacked::kShared, stream, args);
  }
}

// For bfloat16 and float16. Kinds' kernels are compiled by families.
void launch_blocks(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream);
void launch_super_blocks(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream);
void launch_packed(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream);

template <class Kind>
void launch_as(DType dtype, const QuantizedCall& args, Stream stream) {
  dtype == DType::bfloat16 ? launch_kind<bf16, Kind>(args, stream) : launch_kind<f16, Kind>(args, stream);
}

}  // namespace quire::cuda

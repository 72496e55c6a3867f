// The products of float x and rows of bytes, of any kind: linear/product.h's, of numbers that a warp unpacks unit by unit.
// Simple, not tuned.
#include "cuda/quantized/quantized.h"

namespace quire::cuda {
namespace {

// Sixteen lanes unpack a unit of the tile's rows to `unpacked`, [kFloatRows][kUnit].
__device__ __forceinline__ void unpack_unit(RowKind kind, const Work& work, int unit, int features, float* unpacked) {
  const int lane = threadIdx.x % kWarp, t = lane % 4;
  for_kind(kind, [&](auto zero) {
    using Kind = decltype(zero);
    const auto rows = rows_of<float, Kind>(work, kFloatRows);
    if (lane >= 4 * kFloatRows) return;
    const uint8_t* row = rows.row(lane / 4);
    typename Kind::Share share;
#pragma unroll
    for (int run = 0; run < 2; ++run) {
      const Columns at{unit, run, t, features};
      if (at.first() >= features) continue;
      float values[8];
      Kind::fetch(share, work.layout, row, at);
      Kind::values(values, share, work.layout, row, at);
#pragma unroll
      for (int i = 0; i < 8; ++i) unpacked[lane / 4 * kUnit + run * kRun + 8 * t + i] = values[i];
    }
  });
}

__global__ void __launch_bounds__(kWarp * kFloatWarps, 1) floats_kernel(const QuantizedCall args,
                                                                                    RowKind kind) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  Work work;
  if (!find_work<kFloatRows, kFloatTokens>(args, static_cast<int64_t>(blockIdx.x) * kFloatWarps + warp, 1, work))
    return;
  const Launch& launch = args.grouped.launch;
  const auto x = rows_from<float>(launch.x, launch.x_stride, work.first, work.end, kFloatTokens);
  float* unpacked = reinterpret_cast<float*>(dynamic_shared()) + warp * kFloatRows * kUnit;
  float sums[kFloatRows][kFloatTokens] = {};
  for (int unit = 0; unit < units_of(launch.features); ++unit) {
    unpack_unit(kind, work, unit, launch.features, unpacked);
    __syncwarp();
    for (int place = lane; place < kUnit && unit * kUnit + place < launch.features; place += kWarp) {
#pragma unroll
      for (int j = 0; j < kFloatTokens; ++j) {
        if (j >= x.count) break;
        const float value = x.data[j * x.stride + unit * kUnit + place];
#pragma unroll
        for (int i = 0; i < kFloatRows; ++i) sums[i][j] = fmaf(unpacked[i * kUnit + place], value, sums[i][j]);
      }
    }
    __syncwarp();
  }
  const int rows = static_cast<int>(min(work.product.rows - work.row, int64_t{kFloatRows}));
  finish_floats(sums, rows, x.count, [&](int row, int token, float sum) {
    write<float>(launch, work.product, work.first + token, work.row + row, sum);
  });
}

}  // namespace

void launch_floats(RowKind kind, const QuantizedCall& args, Stream stream) {
  const auto tiles = static_cast<int64_t>(most_blocks<kFloatRows, kFloatTokens>(args));
  launch(floats_kernel, dim3(static_cast<unsigned>(divide_up(tiles, kFloatWarps))), dim3(kWarp * kFloatWarps),
         sizeof(float) * kFloatWarps * kFloatRows * kUnit, stream, args, kind);
}

}  // namespace quire::cuda

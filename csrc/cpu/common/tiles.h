// AMX, the matrix unit of Intel's servers (Intel SDM volume 1, chapter 18), as the kernels here use it.
//
// One instruction multiplies a tile of 16 rows of W (32 features each, as they lie) with a tile of up to 16 columns
// (the features in pairs, [16 pairs][columns][2]) and adds to 16 x 16 sums, each by a chain of its own along the
// features: so one column is computed exactly as sixteen are.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/common/simd.h"
#include "cpu/common/transpose.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int kTileSide = 16, kTilePairs = 16, kTileFeatures = 32;
constexpr int64_t kTileElements = kTileSide * kTileFeatures;

// GCC's tile loads do not say which memory they read: without this before them, stores to it may be left out.
inline void before_tiles_read(const void* memory) { asm volatile("" ::"r"(memory) : "memory"); }

// Rows of each tile, and bytes of each of these.
struct TileShapes {
  uint8_t rows[8];
  uint16_t row_bytes[8];
};

// Until _tile_release.
inline void configure_tiles(const TileShapes& shapes) {
  struct {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } layout;
  static_assert(sizeof layout == 64, "the size that the processor reads");
  for (int tile = 0; tile < 8; ++tile) {
    layout.rows[tile] = shapes.rows[tile];
    layout.row_bytes[tile] = shapes.row_bytes[tile];
  }
  before_tiles_read(&layout);
  _tile_loadconfig(&layout);
}

// Tiles 0 to 3 hold sums, [rows][columns]; 4 and 5 rows of W; 6 and 7 columns.
inline void configure_tiles(int columns) {
  const uint16_t bytes = static_cast<uint16_t>(4 * columns);
  configure_tiles({{16, 16, 16, 16, 16, 16, 16, 16}, {bytes, bytes, bytes, bytes, 64, 64, bytes, bytes}});
}

// The sums of tile kSums: [rows][columns], 16 columns apart.
template <int kSums>
inline void store_tile(float* sums) {
  if constexpr (kSums == 0) _tile_stored(0, sums, 64);
  if constexpr (kSums == 1) _tile_stored(1, sums, 64);
  if constexpr (kSums == 2) _tile_stored(2, sums, 64);
  if constexpr (kSums == 3) _tile_stored(3, sums, 64);
}

// The sums of tile kSums, column by column: columns[i] has the sixteen rows' sums of column i.
template <int kSums>
inline void take_sums(Vec columns[kTileSide]) {
  alignas(64) float sums[kTileSide][kTileSide];
  store_tile<kSums>(sums[0]);
  for (int i = 0; i < kTileSide; ++i) columns[i] = load(sums[i]);
  transpose(columns);
}

// The first `count` of 32 features; the others are zero.
inline __m512i load_features(const bf16* p, int64_t count) {
  if (count >= kTileFeatures) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << count) - 1), p);
}

inline Vec as_floats(__m512i a) { return {_mm512_castsi512_ps(a)}; }

}  // namespace QUIRE_ISA
}  // namespace quire

#endif

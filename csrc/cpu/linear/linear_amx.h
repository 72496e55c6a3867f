// The linear kernel for bf16 on AMX (tiles.h): a tile of W is 16 rows as they lie, a tile of x 16 tokens, which are
// turned into columns first, once a call.
//
// Measured: up to 64 tokens, memory is the limit, and 16 rows at a time with a prefetch of their own near features
// reads it best; beyond, two by two tiles read the second-level cache least.
#pragma once

#if defined(__AMX_BF16__)

#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"
#include "cpu/common/tiles.h"
#include "cpu/common/transpose.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kNearTiles = 8;  // how far ahead of the multiplication its rows are prefetched

template <class Out>
class MatrixProducts {
 public:
  using Stored = bf16;   // as weights lie
  using Flushed = bf16;  // of which denormals count as zeros
  static constexpr int kBlockRows = 2 * kTileSide;
  static constexpr bool kLongBlocks = true;

  // x: memory for so many elements.
  MatrixProducts(const LinearArgs& args, bf16* x)
      : args_(args), steps_(steps_of(args)), tiles_(tiles_of(args)),
        columns_(args.tokens < kTileSide ? static_cast<int>(args.tokens) : kTileSide), x_(x) {}
  static int64_t elements(const LinearArgs& args) { return tiles_of(args) * steps_of(args) * kTileElements; }

  // The tokens' tiles, each of which has to be turned into columns, once.
  static constexpr int64_t kTurnGrain = 4;
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(bf16)); }
  int64_t tiles() const { return tiles_; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t tile = begin; tile < end; ++tile) turn_tile(tile);
    before_tiles_read(x_);
  }

  int64_t parts() const { return 1; }
  int64_t first_of(int64_t part) const { return part * args_.tokens; }

  void run(const LinearBlock<bf16, Out>& block, const LinearBlock<bf16, Out>* next) const {
    configure_tiles(columns_);
    const bf16* after = next ? next->w : block.w;
    if (tiles_ <= 4) {
      for (int64_t row = 0; row < block.rows; row += kTileSide) {
        const bool last = row + kTileSide >= block.rows;
        const Rows rows = rows_at(block, row, last ? after : block.w + (row + kTileSide) * args_.features);
        multiply_some(block, rows, 0, static_cast<int>(tiles_));
      }
    } else {
      run_many(block, next);
    }
    _tile_release();
  }

 private:
  // Up to 16 rows of a weight.
  struct Rows {
    const bf16* w;
    const bf16* after;  // what to prefetch when these are nearly done
    int64_t row;        // of the block
    int count;
  };

  static int64_t steps_of(const LinearArgs& args) { return (args.features + kTileFeatures - 1) / kTileFeatures; }
  static int64_t tiles_of(const LinearArgs& args) { return (args.tokens + kTileSide - 1) / kTileSide; }

  Rows rows_at(const LinearBlock<bf16, Out>& block, int64_t row, const bf16* after) const {
    const int64_t left = block.rows - row;
    return {block.w + row * args_.features, after, row, static_cast<int>(left < kTileSide ? left : kTileSide)};
  }

  // x's 16 tokens number `tile`, as [steps][16 pairs][columns][2]; what is past their end is zero.
  void turn_tile(int64_t tile) const {
    bf16* to = x_ + tile * steps_ * kTileElements;
    const int64_t first = tile * kTileSide;
    const int count = static_cast<int>(args_.tokens - first < kTileSide ? args_.tokens - first : kTileSide);
    const bf16* x = static_cast<const bf16*>(args_.x) + first * args_.x_stride;
    for (int64_t k = 0; k < args_.features; k += kTileFeatures, to += 2 * kTilePairs * columns_) {
      const int64_t left = args_.features - k;
      if (columns_ == 1) {
        _mm512_storeu_si512(to, load_features(x + k, left));
        continue;
      }
      Vec rows[kTileSide];
      for (int i = 0; i < kTileSide; ++i)
        rows[i] = i < count ? as_floats(load_features(x + i * args_.x_stride + k, left)) : zero();
      transpose(rows);
      for (int i = 0; i < kTilePairs; ++i)
        store_first(reinterpret_cast<float*>(to + 2 * i * columns_), rows[i], columns_);
    }
  }

  // The rows' features of one step where a tile load would read past the weight's end: into `padded`, zeros around.
  const bf16* pad(const Rows& rows, int64_t k, bf16* padded) const {
    for (int i = 0; i < kTileSide; ++i) {
      const bf16* row = rows.w + i * args_.features + k;
      const __m512i features = i < rows.count ? load_features(row, args_.features - k) : _mm512_setzero_si512();
      _mm512_store_si512(padded + i * kTileFeatures, features);
    }
    before_tiles_read(padded);
    return padded;
  }

  void prefetch(const Rows& rows, int64_t step) const {
    const int64_t ahead = step + kNearTiles;
    const bf16* from = ahead < steps_ ? rows.w + ahead * kTileFeatures : rows.after + (ahead - steps_) * kTileFeatures;
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) __builtin_prefetch(from + i * args_.features, 0, 3);
  }

  // 16 rows with kTiles tiles of tokens from number `tile` on.
  template <int kTiles>
  void multiply(const LinearBlock<bf16, Out>& block, const Rows& rows, int64_t tile) const {
    alignas(64) bf16 padded[kTileElements];
    const int64_t x_row = 4 * columns_, x_step = 2 * kTilePairs * columns_, x_tile = steps_ * kTileElements;
    const bf16* x = x_ + tile * x_tile;
    _tile_zero(0);
    if constexpr (kTiles > 1) _tile_zero(1);
    if constexpr (kTiles > 2) _tile_zero(2);
    if constexpr (kTiles > 3) _tile_zero(3);
    for (int64_t step = 0; step < steps_; ++step, x += x_step) {
      const int64_t k = step * kTileFeatures;
      prefetch(rows, step);
      _tile_loadd(6, x, x_row);
      if (rows.count < kTileSide || k + kTileFeatures > args_.features)
        _tile_loadd(4, pad(rows, k, padded), 64);
      else
        _tile_loadd(4, rows.w + k, args_.features * sizeof(bf16));
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTiles > 1) {
        _tile_loadd(7, x + x_tile, x_row);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kTiles > 2) {
        _tile_loadd(6, x + 2 * x_tile, x_row);
        _tile_dpbf16ps(2, 4, 6);
      }
      if constexpr (kTiles > 3) {
        _tile_loadd(7, x + 3 * x_tile, x_row);
        _tile_dpbf16ps(3, 4, 7);
      }
    }
    finish<0>(block, rows, tile);
    if constexpr (kTiles > 1) finish<1>(block, rows, tile + 1);
    if constexpr (kTiles > 2) finish<2>(block, rows, tile + 2);
    if constexpr (kTiles > 3) finish<3>(block, rows, tile + 3);
  }

  void multiply_some(const LinearBlock<bf16, Out>& block, const Rows& rows, int64_t tile, int tiles) const {
    if (tiles == 1) return multiply<1>(block, rows, tile);
    if (tiles == 2) return multiply<2>(block, rows, tile);
    if (tiles == 3) return multiply<3>(block, rows, tile);
    multiply<4>(block, rows, tile);
  }

  // What is to come from memory while a block is multiplied: so many lines of 64 bytes in each step.
  struct Ahead {
    const char* at;
    const char* end;
    int64_t lines;
    void fetch() {
      for (int64_t i = 0; i < lines; ++i) __builtin_prefetch(at + i * 64, 0, 2);
      at += lines * 64;
      if (at >= end) lines = 0;
    }
  };

  // More tokens than sums can be kept for: the block's rows stay in the cache while all of them pass.
  void run_many(const LinearBlock<bf16, Out>& block, const LinearBlock<bf16, Out>* next) const {
    Ahead ahead{nullptr, nullptr, 0};
    if (next && steps_ > 0) {
      const int64_t bytes = next->rows * args_.features * sizeof(bf16), steps = tiles_ / 2 * steps_;
      ahead = {reinterpret_cast<const char*>(next->w), reinterpret_cast<const char*>(next->w) + bytes,
               (bytes / 64 + steps - 1) / steps};
    }
    for (int64_t row = 0; row < block.rows; row += 2 * kTileSide) {
      if (block.rows - row < 2 * kTileSide || args_.features % kTileFeatures) {
        for (int64_t half = row; half < block.rows && half < row + 2 * kTileSide; half += kTileSide)
          for (int64_t tile = 0; tile < tiles_; tile += 4)
            multiply_some(block, rows_at(block, half, block.w), tile,
                          static_cast<int>(tiles_ - tile < 4 ? tiles_ - tile : 4));
        continue;
      }
      const Rows top = rows_at(block, row, block.w), bottom = rows_at(block, row + kTileSide, block.w);
      int64_t tile = 0;
      for (; tile + 2 <= tiles_; tile += 2) multiply_square(block, top, bottom, tile, ahead);
      if (tile < tiles_) {
        multiply<1>(block, top, tile);
        multiply<1>(block, bottom, tile);
      }
    }
  }

  // 32 rows with two tiles of tokens.
  void multiply_square(const LinearBlock<bf16, Out>& block, const Rows& top, const Rows& bottom, int64_t tile,
                       Ahead& ahead) const {
    const int64_t x_tile = steps_ * kTileElements, w_row = args_.features * sizeof(bf16);
    const bf16 *x = x_ + tile * x_tile, *upper = top.w, *lower = bottom.w;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps_; ++step) {
      ahead.fetch();
      _tile_loadd(6, x, 64);
      _tile_loadd(4, upper, w_row);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, x + x_tile, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, lower, w_row);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      x += kTileElements;
      upper += kTileFeatures;
      lower += kTileFeatures;
    }
    finish<0>(block, top, tile);
    finish<1>(block, top, tile + 1);
    finish<2>(block, bottom, tile);
    finish<3>(block, bottom, tile + 1);
  }

  template <int kSums>
  void finish(const LinearBlock<bf16, Out>& block, const Rows& rows, int64_t tile) const {
    Vec by_token[kTileSide];
    take_sums<kSums>(by_token);
    const int64_t first = tile * kTileSide;
    Out* y = block.y + first * block.y_stride + rows.row;
    const bool biased = block.bias != nullptr;
    const Vec bias = biased ? load_first(block.bias + rows.row, rows.count) : zero();
    for (int64_t i = 0; i < kTileSide && first + i < args_.tokens; ++i) {
      store_first(y + i * block.y_stride, biased ? add(by_token[i], bias) : by_token[i], rows.count);
    }
  }

  const LinearArgs& args_;
  const int64_t steps_, tiles_;  // of features and of tokens
  const int columns_;            // tokens in a tile: 16, or all of fewer
  bf16* const x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

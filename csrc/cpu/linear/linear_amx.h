// The linear kernel for bf16 on AMX (tiles.h): a tile of W is 16 rows as they lie, a tile of x 16 tokens, which are
// turned into columns first, once a call.
//
// Measured: up to 64 tokens, memory is the limit, and 16 rows at a time with a prefetch of their own near features
// reads it best; beyond, two by two tiles read the second-level cache least. There, the tokens' features of a panel are
// to stay in that cache: from the third level, tiles come at half the rate.
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
        columns_(args.tokens < kTileSide ? static_cast<int>(args.tokens) : kTileSide),
        parts_(tiles_ > 0 ? (tiles_ - 1) / kPartTiles + 1 : 1), panels_(panels_of()), x_(x) {}
  static int64_t elements(const LinearArgs& args) { return tiles_of(args) * steps_of(args) * kTileElements; }

  // The tokens' tiles, each of which has to be turned into columns, once.
  static constexpr int64_t kTurnGrain = 4;
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(bf16)); }
  int64_t tall_rows() const { return many() ? kTallRows : 0; }
  int64_t tiles() const { return tiles_; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t tile = begin; tile < end; ++tile) turn_tile(tile);
    before_tiles_read(x_);
  }

  // Into how many parts the tokens are cut: as many share a block as the second-level cache holds of a panel.
  int64_t parts() const { return parts_; }
  int64_t first_of(int64_t part) const {
    const int64_t token = tiles_ * part / parts_ * kTileSide;
    return token < args_.tokens ? token : args_.tokens;
  }

  void run(const LinearBlock<bf16, Out>& block, const LinearBlock<bf16, Out>* next) const {
    configure_tiles(columns_);
    const bf16* after = next ? next->w : block.w;
    if (!many()) {
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
  struct KeptSums;
  static constexpr int64_t kTileSums = kTileSide * kTileSide;
  // So many tiles of tokens share a block, of which a panel is a megabyte at most; and so many rows.
  static constexpr int64_t kPartTiles = 32, kPanelTiles = 1024, kPanelSteps = 64, kTallRows = 512;

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
    const int64_t left = block.rows - row, count = left < 0 ? 0 : left < kTileSide ? left : kTileSide;
    return {block.w + row * args_.features, after, row, static_cast<int>(count)};
  }

  // Whether sums cannot be kept for all tokens, or the second-level cache does not hold these beside the rows.
  bool many() const { return tiles_ > 4 || (tiles_ > 2 && tiles_ * steps_ > kPanelTiles); }
  int64_t panels_of() const {
    if (!many()) return 1;
    const int64_t fit = kPanelTiles / ((tiles_ - 1) / parts_ + 1), most = fit < kPanelSteps ? fit : kPanelSteps;
    return (steps_ - 1) / most + 1;
  }
  int64_t step_of(int64_t panel) const { return steps_ * panel / panels_; }

  // A tile's panel of x, the tiles' panels one behind the other: [steps][16 pairs][columns][2].
  bf16* tokens_at(int64_t panel, int64_t tile) const {
    const int64_t begin = step_of(panel), steps = step_of(panel + 1) - begin;
    return x_ + (begin * tiles_ + tile * steps) * kTileElements;
  }

  // x's 16 tokens number `tile`; what is past their end is zero.
  void turn_tile(int64_t tile) const {
    const int64_t first = tile * kTileSide;
    const int count = static_cast<int>(args_.tokens - first < kTileSide ? args_.tokens - first : kTileSide);
    const bf16* x = static_cast<const bf16*>(args_.x) + first * args_.x_stride;
    for (int64_t panel = 0; panel < panels_; ++panel) {
      bf16* to = tokens_at(panel, tile);
      for (int64_t step = step_of(panel); step < step_of(panel + 1); ++step, to += 2 * kTilePairs * columns_)
        turn_step(x + step * kTileFeatures, args_.features - step * kTileFeatures, count, to);
    }
  }
  // left: so many features from x's on.
  void turn_step(const bf16* x, int64_t left, int count, bf16* to) const {
    if (columns_ == 1) {
      _mm512_storeu_si512(to, load_features(x, left));
      return;
    }
    Vec rows[kTileSide];
    for (int i = 0; i < kTileSide; ++i)
      rows[i] = i < count ? as_floats(load_features(x + i * args_.x_stride, left)) : zero();
    transpose(rows);
    for (int i = 0; i < kTilePairs; ++i)
      store_first(reinterpret_cast<float*>(to + 2 * i * columns_), rows[i], columns_);
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

  // Some features of up to 32 rows, which all tokens of a part pass.
  struct Panel {
    Rows top, bottom;    // 16 rows each, or what there is; `after`: unused
    int64_t begin, end;  // steps
    const bf16* w;       // the first row, at `begin`
    const bf16* after;   // the same of the panel that follows, to be prefetched; or null
    float* kept;         // sums of [pairs][4 tiles], from one panel to the next; null where there is only one
  };

  // Many tokens: their features of a panel stay in the second-level cache while all rows of the block pass, and the sums
  // lie in memory from one panel to the next, so that each chain goes on as if there were none.
  void run_many(const LinearBlock<bf16, Out>& block, const LinearBlock<bf16, Out>* next) const {
    const int64_t groups = (block.rows + kBlockRows - 1) / kBlockRows, sums = pairs_of(block) * 4 * kTileSums;
    float* const kept = panels_ > 1 ? scratch<float, KeptSums>(groups * sums) : nullptr;
    for (int64_t panel = 0; panel < panels_; ++panel) {
      const int64_t begin = step_of(panel), end = step_of(panel + 1);
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t row = group * kBlockRows;
        const bf16* w = block.w + row * args_.features + begin * kTileFeatures;
        const bf16* after = next ? next->w : nullptr;
        if (group + 1 < groups)
          after = w + kBlockRows * args_.features;
        else if (panel + 1 < panels_)
          after = block.w + end * kTileFeatures;
        const Rows top = rows_at(block, row, nullptr), bottom = rows_at(block, row + kTileSide, nullptr);
        multiply_panel(block, panel, {top, bottom, begin, end, w, after, kept ? kept + group * sums : nullptr});
      }
    }
  }

  static int64_t first_tile(const LinearBlock<bf16, Out>& block) { return block.first / kTileSide; }
  static int64_t last_tile(const LinearBlock<bf16, Out>& block) {
    return (block.first + block.tokens + kTileSide - 1) / kTileSide;
  }
  static int64_t pairs_of(const LinearBlock<bf16, Out>& block) {
    return (last_tile(block) - first_tile(block) + 1) / 2;
  }

  void multiply_panel(const LinearBlock<bf16, Out>& block, int64_t number, Panel panel) const {
    const int64_t first = first_tile(block), last = last_tile(block), pairs = pairs_of(block);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const int64_t tile = first + 2 * pair, row = kBlockRows * pair / pairs;
      Ahead ahead{nullptr, 0};
      if (panel.after) ahead = {panel.after + row * args_.features, kBlockRows * (pair + 1) / pairs - row};
      if (tile + 1 < last)
        multiply_square<2>(block, panel, tokens_at(number, tile), tile, ahead);
      else
        multiply_square<1>(block, panel, tokens_at(number, tile), tile, ahead);
      if (panel.kept) panel.kept += 4 * kTileSums;
    }
  }

  // So many rows, of which a line is to be prefetched in each step.
  struct Ahead {
    const bf16* from;
    int64_t count;
  };

  // A panel of up to 32 rows with kTiles tiles of tokens, from number `tile` on, which lie at x.
  template <int kTiles>
  void multiply_square(const LinearBlock<bf16, Out>& block, const Panel& panel, const bf16* x, int64_t tile,
                       const Ahead& ahead) const {
    alignas(64) bf16 padded[2][kTileElements];
    const int64_t x_tile = (panel.end - panel.begin) * kTileElements;
    const bf16 *upper = panel.w, *lower = upper + kTileSide * args_.features;
    int64_t w_row = args_.features * sizeof(bf16);
    start<kTiles>(panel);
    for (int64_t step = panel.begin; step < panel.end; ++step) {
      for (int64_t i = 0; i < ahead.count; ++i) {
        const int64_t feature = i * args_.features + (step - panel.begin) * kTileFeatures;
        __builtin_prefetch(ahead.from + feature, 0, 2);
      }
      if (panel.bottom.count < kTileSide || (step + 1) * kTileFeatures > args_.features) {
        upper = pad(panel.top, step * kTileFeatures, padded[0]);
        lower = pad(panel.bottom, step * kTileFeatures, padded[1]);
        w_row = kTileFeatures * sizeof(bf16);
      }
      _tile_loadd(6, x, 64);
      _tile_loadd(4, upper, w_row);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTiles > 1) {
        _tile_loadd(7, x + x_tile, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_loadd(5, lower, w_row);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kTiles > 1) _tile_dpbf16ps(3, 5, 7);
      x += kTileElements, upper += kTileFeatures, lower += kTileFeatures;
    }
    stop<kTiles>(block, panel, tile);
  }

  // Sums begin, or go on where the panel before has left them.
  template <int kTiles>
  static void start(const Panel& panel) {
    if (panel.begin == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    before_tiles_read(panel.kept);
    _tile_loadd(0, panel.kept, 64);
    _tile_loadd(2, panel.kept + 2 * kTileSums, 64);
    if constexpr (kTiles > 1) {
      _tile_loadd(1, panel.kept + kTileSums, 64);
      _tile_loadd(3, panel.kept + 3 * kTileSums, 64);
    }
  }

  // Sums are kept for the next panel, or done.
  template <int kTiles>
  void stop(const LinearBlock<bf16, Out>& block, const Panel& panel, int64_t tile) const {
    if (panel.end == steps_) {
      finish<0>(block, panel.top, tile);
      if (panel.bottom.count > 0) finish<2>(block, panel.bottom, tile);
      if constexpr (kTiles > 1) {
        finish<1>(block, panel.top, tile + 1);
        if (panel.bottom.count > 0) finish<3>(block, panel.bottom, tile + 1);
      }
      return;
    }
    store_tile<0>(panel.kept);
    store_tile<2>(panel.kept + 2 * kTileSums);
    if constexpr (kTiles > 1) {
      store_tile<1>(panel.kept + kTileSums);
      store_tile<3>(panel.kept + 3 * kTileSums);
    }
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
  const int64_t steps_, tiles_;   // of features and of tokens
  const int columns_;             // tokens in a tile: 16, or all of fewer
  const int64_t parts_, panels_;  // of the tokens and, where there are many of these, of the features
  bf16* const x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

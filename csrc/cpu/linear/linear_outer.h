// The linear kernel on vector registers for more than a few tokens, with the very sums of linear_dot.h.
//
// There, the partial sums of one product fill a register, and the weights' share of the work (loads, widening) is one
// kTileTokens-th of it. Here a register has four partial sums (a quad) of each of kQuads rows, so that a tile of three
// times as many tokens keeps its sums in registers; quad after quad is done, and the tree of reduce4 climbed in
// between. In return the quads of a block's rows are put side by side first, once for all tokens.
//
// Features of many steps are cut into panels, of which all tokens' tiles are done before the next one: what is put side
// by side of it stays in the caches. Between panels the partial sums lie in memory, so that each chain goes on as if
// there were none.
#pragma once

#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/linear/dot.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kOuterTokens = 12;
#else
constexpr int kOuterTokens = 6;
#endif
constexpr int kOuterVecs = 2;

template <class T, class Out>
class OuterProducts {
  using D = Dot<T>;
  using Sum = typename D::Sum;
  using Operand = typename D::Operand;
  static constexpr int kLanes = D::kSumLanes, kQuads = D::kQuads, kParts = D::kParts, kGroups = 4;
  static constexpr int kGroupRows = kOuterVecs * kQuads;  // whose sums are in registers at once

 public:
  using Stored = T;   // as weights lie
  using Flushed = T;  // of which denormals may count as zeros
  static constexpr int kBlockRows = kGroups * kGroupRows;
  static constexpr bool kLongBlocks = false;

  // Whether to be used at all: for fewer tokens, or where the blocks would not go round, linear_dot.h is faster.
  static bool suits(const LinearArgs& args) {
    if (args.features <= 0 || args.tokens < kLeastTokens || (kPairs && panels_of(args) == 1)) return false;
    int64_t rows = 0;
    for (int64_t i = 0; i < args.count; ++i) rows += args.weights[i].rows;
    return rows * parts_of(args) >= kBlocksEach * kBlockRows * max_threads();
  }

  // Names the memory of all tokens' tiles, which is not that of TurnedRows: the caller, whose x_ all threads read, is
  // one of those that turn rows.
  struct TurnedTokens;

  // x: memory for so many elements.
  OuterProducts(const LinearArgs& args, float* x)
      : args_(args), steps_(steps_of(args)), panels_(panels_of(args)), panel_steps_((steps_ - 1) / panels_ + 1),
        tiles_(tiles_of(args)), parts_(parts_of(args)), x_(x) {}
  static int64_t elements(const LinearArgs& args) {
    return tiles_of(args) * kQuads * steps_of(args) * kParts * kOuterTokens * 4;
  }

  // The tokens' tiles, whose quads have to be put side by side, once.
  static constexpr int64_t kTurnGrain = 1;
  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(T)); }
  int64_t tiles() const { return tiles_; }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t t = begin; t < end; ++t) turn_tokens(t);
  }

  // Into how many parts the tokens are cut: as many share a block as the second-level cache holds beside it.
  int64_t parts() const { return parts_; }
  int64_t first_of(int64_t part) const { return token_of(tiles_ * part / parts_); }

  // Meanwhile the rows that follow travel into the second-level cache.
  void run(const LinearBlock<T, Out>& block, const LinearBlock<T, Out>* next) const {
    const int64_t first = tiles_ * block.part / parts_, last = tiles_ * (block.part + 1) / parts_;
    float* w = scratch<float, TurnedRows>(kQuads * quad_rows());
    Sum* kept = panels_ > 1 ? scratch<Sum, KeptSums>((last - first) * kTileSums) : nullptr;
    for (int64_t row = 0; row < block.rows; row += kBlockRows) {
      const int rows = static_cast<int>(block.rows - row < kBlockRows ? block.rows - row : kBlockRows);
      for (int64_t panel = 0; panel < panels_; ++panel) {
        const int64_t begin = step_of(panel), end = step_of(panel + 1);
        turn_rows(block.w + row * args_.features, rows, begin, end, w);
        const Rows ahead = rows_after(block, row, panel, next);
        for (int64_t t = first; t < last; ++t) {
          Sum* own = kept ? kept + (t - first) * kTileSums : nullptr;
          const Tile tile{x_ + t * tile_size(), w, own, begin, end, (t - first) * kQuads * kGroups};
          const int64_t token = token_of(t), count = token_of(t + 1) - token;
          const T* bias = block.bias ? block.bias + row : nullptr;
          multiply_some(count, tile, ahead, bias, block.y + token * block.y_stride + row, block.y_stride, rows);
        }
      }
    }
  }

 private:
  // Measured: what is put side by side has 32 bits even of an fp16, which then costs the more. Pairs that are multiplied
  // as they lie cost linear_dot.h nothing either: there, panels alone pay, of two tiles of eight tokens each on.
  static constexpr bool kPairs = D::kStep == 2 * kLanes && kParts == 1;
  static constexpr int64_t kLeastTiles = kParts == 2 ? 1 : sizeof(T) == 4 ? 2 : 6;
  static constexpr int64_t kLeastTokens = kPairs ? 16 : kOuterTokens * kLeastTiles + 1;
  struct TurnedRows;
  struct KeptSums;
  static constexpr int64_t kBlocksEach = 4, kTokenBytes = 512 << 10, kLeastShare = 4;
  static constexpr int64_t kStepUnits = kParts * kOuterTokens * 4;  // of a quad's tokens
  // A panel's share of a tile's quad and of a group's rows stay in the first-level cache while all groups pass.
  static constexpr int64_t kPanelBytes = 24 << 10, kStepBytes = (kStepUnits + kOuterVecs * kLanes) * 4;
  static constexpr int64_t kPanelSteps = kPanelBytes / kStepBytes;
  // Where there are several, so much of sums is kept, and a quarter of the tokens' panel in the cache.
  static constexpr int64_t kKeptBytes = 768 << 10;
  static constexpr int64_t kTileSums = kQuads * kGroups * kOuterTokens * kOuterVecs;

  struct Tile {
    const float* x;      // [kQuads][steps][kParts][kOuterTokens][4], quads in the order of D::kQuadOrder
    const float* w;      // [kQuads][kGroups][the panel's steps][kOuterVecs] registers of units
    Sum* kept;           // [kQuads][kGroups][kOuterTokens][kOuterVecs], between one panel and the next
    int64_t begin, end;  // the panel's steps
    int64_t run;         // number of its first one of the block's rows with one quad
  };

  // So many rows' features of one panel, to be prefetched.
  struct Rows {
    const T* from;
    int64_t count;
  };

  static int64_t steps_of(const LinearArgs& args) { return (args.features + D::kStep - 1) / D::kStep; }
  static int64_t tiles_of(const LinearArgs& args) { return (args.tokens + kOuterTokens - 1) / kOuterTokens; }
  static int64_t panels_of(const LinearArgs& args) { return (steps_of(args) - 1) / kPanelSteps + 1; }
  static int64_t parts_of(const LinearArgs& args) {
    const int64_t panels = panels_of(args), sum_bytes = kTileSums * static_cast<int64_t>(sizeof(Sum));
    const int64_t tile_bytes = kQuads * kStepUnits * (steps_of(args) / panels + 1) * 4;
    const int64_t fit = panels > 1 ? kKeptBytes / (sum_bytes + tile_bytes / 4) : kTokenBytes / tile_bytes;
    return (tiles_of(args) - 1) / (fit < kLeastShare ? kLeastShare : fit) + 1;
  }
  int64_t step_of(int64_t panel) const { return steps_ * panel / panels_; }
  int64_t token_of(int64_t tile) const { return args_.tokens * tile / tiles_; }

  // The sizes of a quad's share of a tile. Powers of two would crowd the same few places of a cache.
  int64_t tile_size() const { return kQuads * quad_tokens(); }
  int64_t quad_tokens() const { return steps_ * kStepUnits; }
  int64_t quad_rows() const { return (kGroups * panel_steps_ * kOuterVecs + 1) * kLanes; }
  static int groups_of(int rows) { return (rows + kGroupRows - 1) / kGroupRows; }

  void turn_tokens(int64_t tile) const {
    const int64_t first = token_of(tile), count = token_of(tile + 1) - first;
    const T* x = static_cast<const T*>(args_.x) + first * args_.x_stride;
    float* to = x_ + tile * tile_size();
    for (int64_t i = 0; i < count; ++i, x += args_.x_stride)
      for (int64_t s = 0; s < steps_; ++s) put_token<0>(units(x, s), to + s * kStepUnits + i * 4);
  }
  template <int kPart>
  void put_token(Operand units, float* to) const {
    float values[kLanes];
    D::store_floats(values, D::template part<kPart>(units));
    for (int q = 0; q < kQuads; ++q)
      __builtin_memcpy(to + q * quad_tokens(), values + 4 * D::kQuadOrder[q], 4 * sizeof(float));
    if constexpr (kPart + 1 < kParts) put_token<kPart + 1>(units, to + kOuterTokens * 4);
  }

  // What comes after a panel of the block's rows from number `row` on: their next panel, or the next rows' first.
  Rows rows_after(const LinearBlock<T, Out>& block, int64_t row, int64_t panel, const LinearBlock<T, Out>* next) const {
    const int64_t left = block.rows - row;
    const T* rows = block.w + row * args_.features;
    if (panel + 1 < panels_) return {rows + step_of(panel + 1) * D::kStep, left < kBlockRows ? left : kBlockRows};
    if (left > kBlockRows) return {rows + kBlockRows * args_.features, left - kBlockRows};
    return next ? Rows{next->w, next->rows} : Rows{nullptr, 0};
  }

  void turn_rows(const T* from, int count, int64_t begin, int64_t end, float* to) const {
    for (int row = 0; row < count; row += kQuads) {
      const T* w[kQuads];
      for (int j = 0; j < kQuads; ++j) w[j] = from + (row + j < count ? row + j : count - 1) * args_.features;
      float* at = to + (row / kGroupRows * panel_steps_ * kOuterVecs + row % kGroupRows / kQuads) * kLanes;
      for (int64_t s = begin; s < end; ++s) {
        Operand rows[kQuads];
        for (int j = 0; j < kQuads; ++j) rows[j] = units(w[j], s);
        D::turn_quads(rows);
        for (int q = 0; q < kQuads; ++q)
          D::store_floats(at + q * quad_rows() + (s - begin) * kOuterVecs * kLanes, rows[D::kQuadOrder[q]]);
      }
    }
  }

  Operand units(const T* row, int64_t step) const {
    const int64_t left = args_.features - step * D::kStep;
    return left < D::kStep ? D::units(row + step * D::kStep, static_cast<int>(left)) : D::units(row + step * D::kStep);
  }

  template <int kTokens>
  struct Sums {
    Sum sums[kTokens][kOuterVecs];

    inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kOuterVecs; ++v) sums[i][v] = D::zero();
    }
    template <int kPart = 0>
    inline __attribute__((always_inline)) void add_step(const float* x, const Operand* w) {
      Operand own[kOuterVecs];
#pragma GCC unroll 2
      for (int v = 0; v < kOuterVecs; ++v) own[v] = D::template part<kPart>(w[v]);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i) {
        const Operand factor = D::load_quad(x + (kPart * kOuterTokens + i) * 4);
#pragma GCC unroll 2
        for (int v = 0; v < kOuterVecs; ++v) sums[i][v] = D::multiply_add(sums[i][v], factor, own[v]);
      }
      if constexpr (kPart + 1 < kParts) add_step<kPart + 1>(x, w);
    }
    inline __attribute__((always_inline)) void add(const Sum (&others)[kTokens][kOuterVecs]) {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kOuterVecs; ++v) sums[i][v] = D::add(others[i][v], sums[i][v]);
    }
    inline __attribute__((always_inline)) void keep(Sum* kept) const {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kOuterVecs; ++v) kept[i * kOuterVecs + v] = sums[i][v];
    }
    inline __attribute__((always_inline)) void take(const Sum* kept) {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kOuterVecs; ++v) sums[i][v] = kept[i * kOuterVecs + v];
    }
  };

  // kAhead: the line that a step would read of a row at `ahead` is prefetched.
  template <int kTokens, bool kAhead>
  static inline __attribute__((always_inline)) void add_steps(Sums<kTokens>& all, const float* x, const float* w,
                                                              int64_t steps, const T* ahead) {
    for (int64_t s = 0; s < steps; ++s) {
      if constexpr (kAhead) {
        __builtin_prefetch(ahead, 0, 2);
        ahead += D::kStep;
      }
      const Operand own[kOuterVecs] = {D::load_floats(w), D::load_floats(w + kLanes)};
      all.add_step(x, own);
      x += kStepUnits, w += kOuterVecs * kLanes;
    }
  }

  template <int kTokens>
  void multiply(const Tile& tile, const Rows& ahead, const T* bias, Out* y, int64_t y_stride, int rows) const {
    alignas(64) float totals[kTokens + 1][kBlockRows];
    Sum branches[2][kGroups][kTokens][kOuterVecs];  // of the tree: sums of one quad, and of two
    const int groups = groups_of(rows);
    int64_t run = tile.run;
    const int64_t steps = tile.end - tile.begin;
    for (int q = 0; q < kQuads; ++q) {
      const float *x = tile.x + q * quad_tokens() + tile.begin * kStepUnits, *w = tile.w + q * quad_rows();
      for (int g = 0; g < groups; ++g, ++run, w += panel_steps_ * kOuterVecs * kLanes) {
        Sum* kept = tile.kept ? tile.kept + (q * kGroups + g) * kOuterTokens * kOuterVecs : nullptr;
        Sums<kTokens> all;
        if (tile.begin == 0)
          all.clear();
        else
          all.take(kept);
        if (run < ahead.count)
          add_steps<kTokens, true>(all, x, w, steps, ahead.from + run * args_.features);
        else
          add_steps<kTokens, false>(all, x, w, steps, nullptr);
        if (tile.end < steps_) {
          all.keep(kept);
          continue;
        }
        int level = 0;
        for (; q >> level & 1; ++level) all.add(branches[level][g]);
        if (q + 1 < kQuads)
          all.keep(branches[level][g][0]);
        else
          finish<kTokens>(all, totals, g);
      }
    }
    if (tile.end == steps_) put<kTokens>(totals, bias, y, y_stride, rows);
  }

  template <int kTokens>
  static inline __attribute__((always_inline)) void finish(const Sums<kTokens>& all, float (*totals)[kBlockRows],
                                                           int g) {
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; i += 2) {
      const auto& next = all.sums[i + 1 < kTokens ? i + 1 : i];
      float pair[2 * kGroupRows];
      D::store_floats(pair, D::finish4(all.sums[i][0], all.sums[i][1], next[0], next[1]));
      __builtin_memcpy(totals[i] + g * kGroupRows, pair, kGroupRows * sizeof(float));
      __builtin_memcpy(totals[i + 1] + g * kGroupRows, pair + kGroupRows, kGroupRows * sizeof(float));
    }
  }

  template <int kTokens>
  static void put(const float (*totals)[kBlockRows], const T* bias, Out* y, int64_t y_stride, int rows) {
    constexpr int kWidth = QUIRE_ISA::kLanes;
    for (int i = 0; i < kTokens; ++i) {
      for (int at = 0; at < rows; at += kWidth) {
        const int count = rows - at < kWidth ? rows - at : kWidth;
        Vec total = load(totals[i] + at);
        if (bias) total = add(total, load_first(bias + at, count));
        if (count == kWidth)
          store(y + i * y_stride + at, total);
        else
          store_first(y + i * y_stride + at, total, count);
      }
    }
  }

  template <int kTokens = kOuterTokens>
  void multiply_some(int64_t tokens, const Tile& tile, const Rows& ahead, const T* bias, Out* y, int64_t y_stride,
                     int rows) const {
    if (tokens == kTokens) return multiply<kTokens>(tile, ahead, bias, y, y_stride, rows);
    if constexpr (kTokens > 1) multiply_some<kTokens - 1>(tokens, tile, ahead, bias, y, y_stride, rows);
  }

  const LinearArgs& args_;
  const int64_t steps_, panels_, panel_steps_;  // panel_steps_: of the longest panel
  const int64_t tiles_, parts_;                 // parts: of the tokens
  float* const x_;                              // [tiles_] as Tile::x
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

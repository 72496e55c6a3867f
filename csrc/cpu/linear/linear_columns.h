// The linear kernel on registers of 512 bits from a few dozen tokens on (least_tokens), with the very sums of
// linear_dot.h.
//
// There, the sixteen partial sums of one product fill a register. Here a register has one partial sum of each of sixteen
// rows: a tile of kColumnTokens tokens and kColumnRows rows makes one or two partial sums of all its products along the
// features, then the next, and adds them up in between by the tree of reduce4, so that nothing is moved about within a
// register. In return both factors are turned first: tokens once a call, a block's rows once for all tokens of a part.
#pragma once

#if defined(__AVX512F__)

#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/transpose.h"
#include "cpu/linear/dot.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kColumnTokens = 12, kColumnVecs = 2, kColumnRows = kColumnVecs * kLanes;

template <class T, class Out>
class ColumnProducts {
  using D = Dot<T>;
  using Operand = typename D::Operand;

 public:
  using Stored = T;   // as weights lie
  using Flushed = T;  // of which denormals may count as zeros
  static constexpr int kBlockRows = kColumnRows;
  static constexpr bool kLongBlocks = false;

  // Whether to be used at all. Fewer tokens do not pay for turning the rows; of more features, turned rows would not fit
  // in the second-level cache.
  static bool suits(const LinearArgs& args) {
    if (args.features <= 0 || args.tokens < least_tokens(args) || turned_rows(steps_of(args)) > kRowBytes / 4)
      return false;
    return blocks_of(args) * parts_of(args) >= kBlocksEach * max_threads();
  }

  // Names the memory of all tokens' tiles, which is not that of TurnedRows: see linear_outer.h.
  struct TurnedTokens;

  // x: memory for so many elements.
  ColumnProducts(const LinearArgs& args, float* x)
      : args_(args), steps_(steps_of(args)), tiles_(tiles_of(args)), parts_(parts_of(args)), x_(x) {}
  static int64_t elements(const LinearArgs& args) { return tiles_of(args) * tile_size(steps_of(args)); }

  // The tokens' tiles, to be turned once.
  static constexpr int64_t kTurnGrain = 1;
  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(T)); }
  int64_t tiles() const { return tiles_; }
  void turn(int64_t begin, int64_t end) const {
    const T* x = static_cast<const T*>(args_.x);
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = t * kColumnTokens, left = args_.tokens - first;
      float* to = x_ + t * tile_size(steps_);
      turn_block(x + first * args_.x_stride, args_.x_stride, left < kColumnTokens ? left : kColumnTokens,
                 chain_tokens(steps_), kColumnTokens, to);
    }
  }

  // Into how many parts the tokens are cut: as many share a block's turned rows as the third-level cache holds.
  int64_t parts() const { return parts_; }
  int64_t first_of(int64_t part) const {
    const int64_t token = tiles_ * part / parts_ * kColumnTokens;
    return token < args_.tokens ? token : args_.tokens;
  }

  // Meanwhile the rows that follow travel into the second-level cache.
  void run(const LinearBlock<T, Out>& block, const LinearBlock<T, Out>* next) const {
    const int64_t first = tiles_ * block.part / parts_, last = tiles_ * (block.part + 1) / parts_;
    const int64_t groups = (block.rows + kColumnRows - 1) / kColumnRows;
    const bool pairs = steps_ <= kPairSteps;
    float* w = scratch<float, TurnedRows>(turned_rows(steps_));
    Ahead ahead(next ? next->w : nullptr, next ? next->rows * row_bytes() : 0, steps_, groups * (last - first));
    for (int64_t row = 0; row < block.rows; row += kColumnRows) {
      const int64_t left = block.rows - row, rows = left < kColumnRows ? left : kColumnRows;
      for (int64_t at = 0; at < rows; at += kLanes)  // of a second half without rows, whatever lies there is multiplied
        turn_block(block.w + (row + at) * args_.features, args_.features, rows - at, chain_rows(steps_), kColumnRows,
                   w + at);
      const T* bias = block.bias ? block.bias + row : nullptr;
      for (int64_t t = first; t < last; ++t, ahead.advance()) {
        const int64_t token = t * kColumnTokens, tokens = args_.tokens - token;
        const Tile tile{x_ + t * tile_size(steps_),
                        w,
                        bias,
                        block.y + token * block.y_stride + row,
                        block.y_stride,
                        static_cast<int>(tokens < kColumnTokens ? tokens : kColumnTokens),
                        static_cast<int>(rows)};
        if (pairs)
          multiply_some<2>(tile, ahead);
        else
          multiply_some<1>(tile, ahead);
      }
    }
  }

 private:
  struct TurnedRows;
  using Sums = Vec[kColumnTokens][kColumnVecs];
  static constexpr int kLevels = 4, kChains = 1 << kLevels;
  // Measured: two chains at a time pay up to so many steps, of longer ones they want more than the first-level cache
  // holds.
  static constexpr int64_t kPairSteps = 32;
  static constexpr int64_t kBlocksEach = 4;
  // Of a part's tokens, which each of its blocks reads from the third-level cache, and of a block's rows, turned.
  static constexpr int64_t kTokenBytes = 8 << 20, kLeastTiles = 8, kRowBytes = 640 << 10;

  // Measured beside linear_dot.h, to which longer features come dearer.
  static int64_t least_tokens(const LinearArgs& args) {
    if (args.features > 1024) return kColumnTokens + 1;
    return sizeof(T) == 4 ? 29 : 73;
  }
  static int64_t steps_of(const LinearArgs& args) { return (args.features + D::kStep - 1) / D::kStep; }
  static int64_t tiles_of(const LinearArgs& args) { return (args.tokens + kColumnTokens - 1) / kColumnTokens; }
  static int64_t blocks_of(const LinearArgs& args) {
    int64_t rows = 0;
    for (int64_t i = 0; i < args.count; ++i) rows += args.weights[i].rows;
    return rows / kColumnRows;
  }
  static int64_t parts_of(const LinearArgs& args) {
    const int64_t tiles = tiles_of(args), blocks = blocks_of(args) + 1, wanted = kBlocksEach * max_threads();
    const int64_t least = (wanted - 1) / blocks + 1, most = (tiles - 1) / kLeastTiles + 1;
    const int64_t fitting = elements(args) * 4 / kTokenBytes + 1, parts = fitting > least ? fitting : least;
    return parts < most ? parts : most;
  }

  // Floats of a chain's share of turned tokens and rows. Powers of two would crowd the same few places of a cache.
  static int64_t chain_tokens(int64_t steps) { return steps * kColumnTokens + kLanes; }
  static int64_t chain_rows(int64_t steps) { return steps * kColumnRows + kLanes; }
  static int64_t tile_size(int64_t steps) { return kChains * chain_tokens(steps); }
  static int64_t turned_rows(int64_t steps) { return kChains * chain_rows(steps); }

  // Which partial sum is made as number i: so that each one's counterpart in the tree is there when it is needed.
  static constexpr int kOrder[kChains] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

  // to[chain][step][width]: sixteen rows, of which the first `count` are there. The last of them stands for the others,
  // too: what is computed of these is not kept. What does not fit in `width` is written over by the next step, and behind
  // the last one there is room for it.
  void turn_block(const T* rows, int64_t stride, int64_t count, int64_t chain, int width, float* to) const {
    const T* from[kLanes];
    for (int i = 0; i < kLanes; ++i) from[i] = rows + (i < count ? i : count - 1) * stride;
    const auto turn = [&](const auto& units_of) {
      Vec units[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) units[i] = {units_of(from[i])};
      transpose(units);
#pragma GCC unroll 16
      for (int i = 0; i < kChains; ++i) store(to + i * chain, units[kOrder[i]]);
    };
    const int64_t features = args_.features, whole = features / D::kStep * D::kStep;
    for (int64_t at = 0; at < whole; at += D::kStep, to += width)
      turn([at](const T* row) { return D::units(row + at); });
    const int left = static_cast<int>(features - whole);
    if (left > 0) turn([whole, left](const T* row) { return D::units(row + whole, left); });
  }

  // The rows that follow. Each chain of a tile that takes part fetches a line of them at each of its steps.
  struct Ahead {
    Ahead(const T* rows, int64_t bytes, int64_t steps, int64_t tiles)
        : at(reinterpret_cast<const char*>(rows)), left(bytes), chain_bytes(steps * kLine),
          tile_bytes(((bytes + chain_bytes * tiles - 1) / (chain_bytes * tiles)) * chain_bytes) {}
    void advance() {
      const int64_t done = left < tile_bytes ? left : tile_bytes;
      at += done, left -= done;
    }
    // Where a tile's chain fetches, `before` bytes after its first one; or null.
    const char* of_chain(int64_t before) const { return before < tile_bytes && before < left ? at + before : nullptr; }

    static constexpr int64_t kLine = 64;
    const char* at;
    int64_t left;
    const int64_t chain_bytes, tile_bytes;  // what a chain fetches, and a tile
  };

  // A tile's part in y, of whose tokens and rows so many exist.
  struct Tile {
    const float *x, *w;  // [kChains][steps][kColumnTokens] and [kColumnRows], in kOrder
    const T* bias;
    Out* y;
    int64_t y_stride;
    int tokens, rows;
  };

  // What fills the registers: a chain of all of a tile's tokens, or two of half of them, so that the first addition of
  // the tree needs no memory.
  template <int kTogether, int kTokens>
  using Registers = Vec[kTogether][kTokens / kTogether][kColumnVecs];

  // kAhead: a line is fetched at each step, from `ahead` on.
  template <int kTogether, int kTokens, bool kAhead>
  static inline __attribute__((always_inline)) void add_steps(Registers<kTogether, kTokens>& sums, const float* x,
                                                              const float* w, int64_t steps, const char* ahead) {
    const int64_t next_x = chain_tokens(steps), next_w = chain_rows(steps);
    for (int64_t s = 0; s < steps; ++s, x += kColumnTokens, w += kColumnRows) {
      if constexpr (kAhead) __builtin_prefetch(ahead + s * Ahead::kLine, 0, 2);
      Operand own[kTogether][kColumnVecs];
#pragma GCC unroll 2
      for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v) own[c][v] = D::load_floats(w + c * next_w + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kTokens / kTogether; ++i) {
#pragma GCC unroll 2
        for (int c = 0; c < kTogether; ++c) {
          const Operand factor = set1(x[c * next_x + i]).v;
#pragma GCC unroll 2
          for (int v = 0; v < kColumnVecs; ++v) sums[c][i][v].v = D::multiply_add(sums[c][i][v].v, factor, own[c][v]);
        }
      }
    }
  }

  // Chains up to number `last` of the tokens from `first` on, and what is in front of them in the tree: into the branch
  // that waits for what follows. ahead: null, or what add_steps fetches.
  template <int kTogether, int kTokens>
  static inline __attribute__((always_inline)) void multiply_chains(const float* x, const float* w, int64_t steps,
                                                                    int last, int first, const char* ahead,
                                                                    Sums* branches) {
    constexpr int kShare = kTokens / kTogether;
    Registers<kTogether, kTokens> sums;
#pragma GCC unroll 16
    for (int i = 0; i < kShare; ++i)
#pragma GCC unroll 2
      for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v) sums[c][i][v] = zero();
    if (ahead)
      add_steps<kTogether, kTokens, true>(sums, x, w, steps, ahead);
    else
      add_steps<kTogether, kTokens, false>(sums, x, w, steps, nullptr);
    const auto add_to_first = [&](const Vec(*more)[kColumnVecs], bool before) {
#pragma GCC unroll 16
      for (int i = 0; i < kShare; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v)
          sums[0][i][v] = before ? add(more[i][v], sums[0][i][v]) : add(sums[0][i][v], more[i][v]);
    };
    if (kTogether == 2) add_to_first(sums[kTogether - 1], false);
    int level = kTogether / 2;
    for (; level < kLevels && (last >> level & 1); ++level) add_to_first(branches[level] + first, true);
    Vec(*kept)[kColumnVecs] = branches[level < kLevels ? level : 0] + first;
#pragma GCC unroll 16
    for (int i = 0; i < kShare; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kColumnVecs; ++v) kept[i][v] = sums[0][i][v];
  }

  template <int kTogether, int kTokens>
  void multiply(const Tile& tile, const Ahead& ahead) const {
    Sums branches[kLevels];  // of the tree: sums of 1, 2, 4 and 8 chains; in the end the first has all
    const int64_t steps = steps_, next_x = kTogether * chain_tokens(steps), next_w = kTogether * chain_rows(steps);
    const float *x = tile.x, *w = tile.w;
    int64_t fetched = 0;
    for (int last = kTogether - 1; last < kChains; last += kTogether, x += next_x, w += next_w)
      for (int first = 0; first < kTokens; first += kTokens / kTogether, fetched += ahead.chain_bytes)
        multiply_chains<kTogether, kTokens>(x + first, w, steps, last, first, ahead.of_chain(fetched), branches);
    put(branches[0], tile);
  }
  // By the smallest of three that takes the tile's tokens.
  template <int kTogether>
  void multiply_some(const Tile& tile, const Ahead& ahead) const {
    if (tile.tokens <= kColumnTokens / 3)
      multiply<kTogether, kColumnTokens / 3>(tile, ahead);
    else if (tile.tokens <= kColumnTokens * 2 / 3)
      multiply<kTogether, kColumnTokens * 2 / 3>(tile, ahead);
    else
      multiply<kTogether, kColumnTokens>(tile, ahead);
  }

  static void put(const Sums& sums, const Tile& tile) {
    for (int v = 0; v < kColumnVecs; ++v) {
      const int at = v * kLanes, count = tile.rows - at < kLanes ? tile.rows - at : kLanes;
      if (count <= 0) return;
      const Vec shift = tile.bias ? load_first(tile.bias + at, count) : zero();
      for (int i = 0; i < tile.tokens; ++i) {
        const Vec total = tile.bias ? add(sums[i][v], shift) : sums[i][v];
        Out* y = tile.y + i * tile.y_stride + at;
        if (count == kLanes)
          store(y, total);
        else
          store_first(y, total, count);
      }
    }
  }

  const LinearArgs& args_;
  const int64_t steps_, tiles_, parts_;  // parts: of the tokens
  float* const x_;                       // [tiles_] of [kChains][steps][kColumnTokens], in kOrder
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

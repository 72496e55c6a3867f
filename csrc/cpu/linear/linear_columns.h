// The linear kernel on registers of 512 bits for many tokens, with the very sums of linear_dot.h.
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
    if (args.features <= 0 || args.tokens < kLeastTokens || turned_rows(steps_of(args)) > kRowBytes / 4) return false;
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
    const int64_t ahead = next ? next->rows * row_bytes() / (last - first) : 0;  // bytes for each tile
    const auto run_tile = steps_ > kPairSteps ? &ColumnProducts::multiply<1> : &ColumnProducts::multiply<2>;
    float* w = scratch<float, TurnedRows>(turned_rows(steps_));
    for (int64_t row = 0; row < block.rows; row += kColumnRows) {
      const int64_t left = block.rows - row, rows = left < kColumnRows ? left : kColumnRows;
      for (int64_t half = 0; half < kColumnVecs; ++half) {
        const int64_t own = rows - half * kLanes;
        turn_block(block.w + (row + half * kLanes) * args_.features, args_.features,
                   own < 0        ? 0
                   : own < kLanes ? own
                                  : kLanes,
                   chain_rows(steps_), kColumnRows, w + half * kLanes);
      }
      const T* bias = block.bias ? block.bias + row : nullptr;
      for (int64_t t = first; t < last; ++t) {
        if (row == 0) prefetch(next, (t - first) * ahead, ahead);
        const int64_t token = t * kColumnTokens, tokens = args_.tokens - token;
        (this->*run_tile)(x_ + t * tile_size(steps_), w, bias, block.y + token * block.y_stride + row, block.y_stride,
                          static_cast<int>(tokens < kColumnTokens ? tokens : kColumnTokens), static_cast<int>(rows));
      }
    }
  }

 private:
  struct TurnedRows;
  using Sums = Vec[kColumnTokens][kColumnVecs];
  static constexpr int kLevels = 4, kChains = 1 << kLevels;
  // Measured: two chains at a time pay up to so many steps, of longer ones they want more than the first-level cache
  // holds; and the other kernels take less time of halves for longer.
  static constexpr int64_t kPairSteps = 32;
  static constexpr int64_t kLeastTokens = sizeof(T) == 4 ? 121 : 241, kBlocksEach = 4;
  // Of a part's tokens, and of a block's rows, turned.
  static constexpr int64_t kTokenBytes = 2 << 20, kLeastTiles = 8, kRowBytes = 640 << 10;

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

  // to[chain][step][width]: sixteen rows, of which `count` are there and the others zeros. What does not fit in `width`
  // is written over by the next step, and behind the last one there is room for it.
  void turn_block(const T* rows, int64_t stride, int64_t count, int64_t chain, int width, float* to) const {
    for (int64_t s = 0; s < steps_; ++s, to += width) {
      Vec units[kLanes];
      for (int i = 0; i < kLanes; ++i) units[i] = i < count ? Vec{units_at(rows + i * stride, s)} : zero();
      transpose(units);
      for (int i = 0; i < kChains; ++i) store(to + i * chain, units[kOrder[i]]);
    }
  }
  Operand units_at(const T* row, int64_t step) const {
    const int64_t left = args_.features - step * D::kStep;
    return left < D::kStep ? D::units(row + step * D::kStep, static_cast<int>(left)) : D::units(row + step * D::kStep);
  }

  static void prefetch(const LinearBlock<T, Out>* next, int64_t from, int64_t bytes) {
    const char* rows = next ? reinterpret_cast<const char*>(next->w) + from : nullptr;
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + at, 0, 2);
  }

  // What fills the registers: a chain of all of a tile's tokens, or two of half of them, so that the first addition of
  // the tree needs no memory.
  template <int kTogether>
  using Registers = Vec[kTogether][kColumnTokens / kTogether][kColumnVecs];

  template <int kTogether>
  static inline __attribute__((always_inline)) void add_steps(Registers<kTogether>& sums, const float* x,
                                                              const float* w, int64_t steps) {
    const int64_t next_x = chain_tokens(steps), next_w = chain_rows(steps);
    for (int64_t s = 0; s < steps; ++s, x += kColumnTokens, w += kColumnRows) {
      Operand own[kTogether][kColumnVecs];
#pragma GCC unroll 2
      for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v) own[c][v] = D::load_floats(w + c * next_w + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kColumnTokens / kTogether; ++i) {
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
  // that waits for what follows.
  template <int kTogether>
  static inline __attribute__((always_inline)) void multiply_chains(const float* x, const float* w, int64_t steps,
                                                                    int last, int first, Sums* branches) {
    constexpr int kTokens = kColumnTokens / kTogether;
    Registers<kTogether> sums;
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
      for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v) sums[c][i][v] = zero();
    add_steps<kTogether>(sums, x, w, steps);
    const auto add_to_first = [&](const Vec(*more)[kColumnVecs], bool before) {
#pragma GCC unroll 16
      for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kColumnVecs; ++v)
          sums[0][i][v] = before ? add(more[i][v], sums[0][i][v]) : add(sums[0][i][v], more[i][v]);
    };
    if (kTogether == 2) add_to_first(sums[kTogether - 1], false);
    int level = kTogether / 2;
    for (; level < kLevels && (last >> level & 1); ++level) add_to_first(branches[level] + first, true);
    Vec(*kept)[kColumnVecs] = branches[level < kLevels ? level : 0] + first;
#pragma GCC unroll 16
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kColumnVecs; ++v) kept[i][v] = sums[0][i][v];
  }

  // y of a tile, of whose tokens and rows so many exist.
  template <int kTogether>
  void multiply(const float* x, const float* w, const T* bias, Out* y, int64_t y_stride, int tokens, int rows) const {
    Sums branches[kLevels];  // of the tree: sums of 1, 2, 4 and 8 chains; in the end the first has all
    const int64_t steps = steps_, next_x = kTogether * chain_tokens(steps), next_w = kTogether * chain_rows(steps);
    for (int last = kTogether - 1; last < kChains; last += kTogether, x += next_x, w += next_w)
      for (int first = 0; first < kColumnTokens; first += kColumnTokens / kTogether)
        multiply_chains<kTogether>(x + first, w, steps, last, first, branches);
    put(branches[0], bias, y, y_stride, tokens, rows);
  }

  static void put(const Sums& sums, const T* bias, Out* y, int64_t y_stride, int tokens, int rows) {
    for (int v = 0; v < kColumnVecs; ++v) {
      const int at = v * kLanes, count = rows - at < kLanes ? rows - at : kLanes;
      if (count <= 0) return;
      const Vec shift = bias ? load_first(bias + at, count) : zero();
      for (int i = 0; i < tokens; ++i) {
        const Vec total = bias ? add(sums[i][v], shift) : sums[i][v];
        if (count == kLanes)
          store(y + i * y_stride + at, total);
        else
          store_first(y + i * y_stride + at, total, count);
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

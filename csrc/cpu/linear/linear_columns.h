// The linear kernel on registers of 512 bits, with the very sums of linear_dot.h: for weights that lie packed, and for
// rows from a few dozen tokens on (least_tokens).
//
// In linear_dot.h, the sixteen partial sums of one product fill a register. Here a register has one partial sum of each of
// sixteen rows (columns.h): a tile of tokens and a group of rows makes one or two partial sums of all its products along
// the features, then the next, and adds them up in between by the tree of reduce4, so that nothing is moved about within a
// register.
#pragma once

#if defined(__AVX512F__)

#include "cpu/common/parallel.h"
#include "cpu/common/processor.h"
#include "cpu/common/scratch.h"
#include "cpu/linear/columns.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class T, class Out>
class ColumnProducts {
  using D = Dot<T>;
  using C = Columns<T>;
  using Operand = typename D::Operand;
  static constexpr int kTokens = C::kTokens, kVecs = C::kVecs, kRows = C::kRows, kChains = C::kChains;

 public:
  using Stored = T;   // as weights lie
  using Flushed = T;  // of which denormals may count as zeros
  static constexpr int kBlockRows = kRows;
  static constexpr bool kLongBlocks = true;

  // Whether to be used at all. Fewer tokens do not pay for turning the rows; of more features, turned rows would not fit
  // in the second-level cache.
  static bool suits(const LinearArgs& args) {
    if (args.packed) return true;
    if (args.features <= 0 || args.tokens < least_tokens(args) || C::turned_rows(steps_of(args)) > kRowBytes / 4)
      return false;
    return groups_of(args) * parts_of(args) >= kBlocksEach * max_threads();
  }

  // Names the memory of all tokens' tiles, which is not that of TurnedRows: see linear_outer.h.
  struct TurnedTokens;

  // x: memory for so many elements.
  ColumnProducts(const LinearArgs& args, float* x)
      : args_(args), steps_(steps_of(args)), tiles_(tiles_of(args)),
        width_(tiles_ > 0 ? (args.tokens - 1) / tiles_ + 1 : 0), chain_(C::chain_tokens(steps_, width_)),
        parts_(parts_of(args)), x_(x) {}
  static int64_t elements(const LinearArgs& args) { return tiles_of(args) * C::tile_size(steps_of(args)); }

  // The tokens' tiles, to be turned once. A few of them are turned sooner than a team is woken.
  static constexpr int64_t kTurnGrain = 4;
  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(T)); }
  int64_t tiles() const { return tiles_; }
  void turn(int64_t begin, int64_t end) const {
    const T* x = static_cast<const T*>(args_.x);
    for (int64_t t = begin; t < end; ++t)
      C::turn(x + first_token(t) * args_.x_stride, args_.x_stride, first_token(t + 1) - first_token(t), args_.features,
              chain_, width_, x_ + t * C::tile_size(steps_));
  }

  // Into how many parts the tokens are cut: as many share a block's turned rows as the third-level cache holds.
  int64_t parts() const { return parts_; }
  int64_t first_of(int64_t part) const { return first_token(tiles_ * part / parts_); }

  // Meanwhile the weights that follow travel into a cache.
  void run(const LinearBlock<T, Out>& block, const LinearBlock<T, Out>* next) const {
    const bool packed = args_.packed && args_.packed[block.weight];
    const int64_t chain = packed ? C::packed_chain(steps_) : C::chain_rows(steps_);
    const int64_t first = tiles_ * block.part / parts_, last = tiles_ * (block.part + 1) / parts_;
    float* turned = packed ? nullptr : scratch<float, TurnedRows>(C::turned_rows(steps_));
    for (int64_t row = 0; row < block.rows; row += kRows) {
      const T* own = block.w + row * args_.features;
      const T* below = row + kRows < block.rows ? own + kRows * args_.features : next ? next->w : nullptr;
      if (!packed) C::turn_group(own, block.rows - row, args_.features, chain, turned);
      Ahead ahead(below, kRows * row_bytes(), (last - first) * kChains);
      for (int64_t t = first; t < last; ++t) {
        const Tile tile{x_ + t * C::tile_size(steps_),
                        packed ? reinterpret_cast<const float*>(own) : turned,
                        chain,
                        first_token(t),
                        static_cast<int>(first_token(t + 1) - first_token(t)),
                        row};
        if (tiles_ > 1)
          multiply_many(block, tile, ahead);
        else if (packed && !kAmdBeforeZen5 && tile.tokens <= kStreamTokens)
          multiply_some<kStreamTokens, Stream>(block, tile, Stream(row + kRows < block.rows ? nullptr : below));
        else if (packed && kAmdBeforeZen5 && tile.tokens <= kFewTokens)
          multiply_some<kFewTokens, NoLine>(block, tile, NoLine{});
        else
          multiply_some<kTokens, TwoLines>(block, tile, TwoLines{ahead});
      }
    }
  }

 private:
  struct TurnedRows;
  using Sums = Vec[kTokens][kVecs];
  using Tree = Sums[C::kLevels];  // sums of 1, 2, 4 and 8 chains; in the end the first has all
  // Measured: with so many tiles, two chains at a time pay up to so many steps; of longer ones they want more than the
  // first-level cache holds.
  static constexpr int64_t kPairSteps = 32, kPairTiles = 8;
  // Up to so many tokens, measured, a product takes no longer than its weights take to come. These are asked for a little
  // ahead of their use (kStreamTokens); on AMD's processors before Zen 5, whose own prefetchers are faster, they are not
  // asked for at all (kFewTokens).
  static constexpr int kStreamTokens = 6, kFewTokens = 5;
  static constexpr int64_t kBlocksEach = 4;
  // Of a part's tokens, which each of its blocks reads from the third-level cache, and of a group's rows, turned.
  static constexpr int64_t kTokenBytes = 8 << 20, kLeastTiles = 8, kRowBytes = 640 << 10;
  static constexpr int64_t kLine = 64;

  // Measured beside linear_dot.h, to which longer features come dearer.
  static int64_t least_tokens(const LinearArgs& args) {
    if (args.features > 1024) return kTokens + 1;
    return sizeof(T) == 4 ? 29 : 73;
  }
  static int64_t steps_of(const LinearArgs& args) { return C::steps(args.features); }
  static int64_t tiles_of(const LinearArgs& args) { return (args.tokens + kTokens - 1) / kTokens; }
  static int64_t groups_of(const LinearArgs& args) {
    int64_t rows = 0;
    for (int64_t i = 0; i < args.count; ++i) rows += args.weights[i].rows;
    return rows / kRows;
  }
  static int64_t parts_of(const LinearArgs& args) {
    const int64_t tiles = tiles_of(args), groups = groups_of(args) + 1, wanted = kBlocksEach * max_threads();
    const int64_t least = (wanted - 1) / groups + 1, most = (tiles - 1) / kLeastTiles + 1;
    const int64_t fitting = elements(args) * 4 / kTokenBytes + 1, parts = fitting > least ? fitting : least;
    return parts < most ? parts : most;
  }
  // Tiles are as equal as can be.
  int64_t first_token(int64_t tile) const { return args_.tokens * tile / tiles_; }

  // Some tokens, turned, and a group of rows, turned, whose chains lie so many floats apart.
  struct Tile {
    const float *x, *w;
    int64_t chain, token;
    int tokens;
    int64_t row;  // of the block
  };

  // The group that follows, on its way into the second-level cache: a part of it in each of so many calls.
  class Ahead {
   public:
    Ahead(const T* rows, int64_t bytes, int64_t calls)
        : at_(reinterpret_cast<const char*>(rows)), left_(rows ? (bytes + kLine - 1) / kLine : 0),
          part_((left_ + calls - 1) / calls) {}
    // The next call's first line, and how many.
    const char* take(int64_t* lines) {
      const char* first = at_;
      *lines = left_ < part_ ? left_ : part_;
      at_ += *lines * kLine, left_ -= *lines;
      return first;
    }

   private:
    const char* at_;
    int64_t left_;
    const int64_t part_;
  };

  // What fetches while the steps of a chain are made: kLines at each of the first `steps`, from `at` on.
  struct NoLine {
    static constexpr int kLines = 0, kCache = 2;
    static constexpr const char* at = nullptr;
    static constexpr int64_t steps = 0;
    void begin(const float*, int64_t, bool) {}
  };
  struct OneLine {
    static constexpr int kLines = 1, kCache = 2;  // the second-level one, as __builtin_prefetch counts them
    Ahead& ahead;
    const char* at = nullptr;
    int64_t steps = 0;
    void begin(const float*, int64_t, bool) { at = ahead.take(&steps); }
  };
  struct TwoLines {
    static constexpr int kLines = 2, kCache = 2;
    Ahead& ahead;
    const char* at = nullptr;
    int64_t steps = 0;
    void begin(const float*, int64_t, bool) { at = ahead.take(&steps), steps = (steps + 1) / 2; }
  };
  // The packed weights themselves, a little ahead of their use: a block's lie in the order in which they are taken.
  struct Stream {
    static constexpr int kLines = 2, kCache = 3;
    static constexpr int64_t kDistance = 64;  // steps; measured
    explicit Stream(const T* rows) : elsewhere(reinterpret_cast<const char*>(rows)) {}
    const char* const elsewhere;  // where what follows a group lies, unless it is the next one of the block
    const char* at = nullptr;
    int64_t steps = 0;
    void begin(const float* w, int64_t of_chain, bool last) {
      at = last && elsewhere ? elsewhere : reinterpret_cast<const char*>(w + kDistance * kRows);
      steps = of_chain;
    }
  };

  void multiply_many(const LinearBlock<T, Out>& block, const Tile& tile, Ahead& ahead) const {
    if (tiles_ >= kPairTiles && steps_ <= kPairSteps && tile.tokens > kTokens / 2)
      multiply<2, kTokens>(block, tile, OneLine{ahead});
    else
      multiply_some<kTokens, OneLine>(block, tile, OneLine{ahead});
  }
  // By the function of as many tokens as the tile has, kMost at most.
  template <int kMost, class Fetch>
  void multiply_some(const LinearBlock<T, Out>& block, const Tile& tile, const Fetch& fetch) const {
    if constexpr (kMost > 1)
      if (tile.tokens < kMost) return multiply_some<kMost - 1, Fetch>(block, tile, fetch);
    multiply<1, kMost>(block, tile, fetch);
  }

  // kTogether: chains that are made together, of a part of the tokens, so that the first addition of the tree needs no
  // memory.
  template <int kTogether, int kOwn, class Fetch>
  void multiply(const LinearBlock<T, Out>& block, const Tile& tile, Fetch fetch) const {
    Tree tree;
    const int64_t next_x = kTogether * chain_, next_w = kTogether * tile.chain;
    const float *x = tile.x, *w = tile.w;
    for (int last = kTogether - 1; last < kChains; last += kTogether, x += next_x, w += next_w)
      for (int first = 0; first < kOwn; first += kOwn / kTogether) {
        fetch.begin(w, steps_, last == kChains - 1);
        multiply_chains<kTogether, kOwn / kTogether>(x + first, w, tile.chain, last, first, fetch, tree);
      }
    put(block, tile, tree[0]);
  }

  // What fills the registers.
  template <int kTogether, int kOwn>
  using Registers = Vec[kTogether][kOwn][kVecs];

  // Chains up to number `last` of the tokens from `first` on, and what is in front of them in the tree: into the branch
  // that waits for what follows.
  template <int kTogether, int kOwn, class Fetch>
  inline __attribute__((always_inline)) void multiply_chains(const float* x, const float* w, int64_t chain, int last,
                                                             int first, const Fetch& fetch, Tree& tree) const {
    Registers<kTogether, kOwn> sums;
#pragma GCC unroll 2
    for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 16
      for (int i = 0; i < kOwn; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) sums[c][i][v] = zero();
    add_steps<kTogether, kOwn>(sums, x, w, chain, fetch);
    const auto add_to_first = [&](const Vec(*more)[kVecs], bool before) {
#pragma GCC unroll 16
      for (int i = 0; i < kOwn; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v)
          sums[0][i][v] = before ? add(more[i][v], sums[0][i][v]) : add(sums[0][i][v], more[i][v]);
    };
    if (kTogether == 2) add_to_first(sums[kTogether - 1], false);
    int level = kTogether / 2;
    for (; level < C::kLevels && (last >> level & 1); ++level) add_to_first(tree[level] + first, true);
    Vec(*kept)[kVecs] = tree[level < C::kLevels ? level : 0] + first;
#pragma GCC unroll 16
    for (int i = 0; i < kOwn; ++i)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) kept[i][v] = sums[0][i][v];
  }

  template <int kTogether, int kOwn, class Fetch>
  inline __attribute__((always_inline)) void add_steps(Registers<kTogether, kOwn>& sums, const float* x, const float* w,
                                                       int64_t chain, const Fetch& fetch) const {
    const int64_t next_x = chain_, width = width_, steps = steps_;
    const char* ahead = fetch.at;
    for (int64_t s = 0; s < steps; ++s, x += width, w += kRows) {
      if (s < fetch.steps) {
#pragma GCC unroll 2
        for (int i = 0; i < Fetch::kLines; ++i, ahead += kLine) __builtin_prefetch(ahead, 0, Fetch::kCache);
      }
      Operand own[kTogether][kVecs];
#pragma GCC unroll 2
      for (int c = 0; c < kTogether; ++c)
#pragma GCC unroll 2
        for (int v = 0; v < kVecs; ++v) own[c][v] = D::load_floats(w + c * chain + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kOwn; ++i) {
#pragma GCC unroll 2
        for (int c = 0; c < kTogether; ++c) {
          const Operand factor = set1(x[c * next_x + i]).v;
#pragma GCC unroll 2
          for (int v = 0; v < kVecs; ++v) sums[c][i][v].v = D::multiply_add(sums[c][i][v].v, factor, own[c][v]);
        }
      }
    }
  }

  void put(const LinearBlock<T, Out>& block, const Tile& tile, const Sums& sums) const {
    for (int v = 0; v < kVecs; ++v) {
      const int64_t at = tile.row + v * kLanes, left = block.rows - at;
      if (left <= 0) return;
      const int count = left < kLanes ? static_cast<int>(left) : kLanes;
      const Vec shift = block.bias ? load_first(block.bias + at, count) : zero();
      for (int i = 0; i < tile.tokens; ++i) {
        const Vec total = block.bias ? add(sums[i][v], shift) : sums[i][v];
        Out* y = block.y + (tile.token + i) * block.y_stride + at;
        if (count == kLanes)
          store(y, total);
        else
          store_first(y, total, count);
      }
    }
  }

  const LinearArgs& args_;
  const int64_t steps_, tiles_;
  const int64_t width_;  // tokens of the widest tile: the narrower, the more of x a first-level cache holds
  const int64_t chain_;  // floats from a chain of a tile's tokens to the next one
  const int64_t parts_;  // of the tokens
  float* const x_;       // [tiles_], as far apart as kTokens want, of [kChains][steps][width_]
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

// The linear kernel on vector registers: kTileTokens x kTileRows dot products at a time.
//
// Where the processor cannot multiply the elements as they are, x is widened once a call, and weights on their way into
// registers. For more than a few tokens see linear_columns.h and linear_outer.h,
// which linear_run.h asks first, in this order.
#pragma once

#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/linear/dot.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// A call's x as multiplications take it: where it lies, or widened, with zeros up to the end of the last step.
template <class T>
class Factors {
 public:
  using D = Dot<T>;
  using Wide = typename D::Wide;

  Factors() = default;
  explicit Factors(const LinearArgs& args) {
    const T* x = static_cast<const T*>(args.x);
    const int64_t features = args.features, x_stride = args.x_stride;
    if constexpr (kWidens<T>) {
      // Rows a power of two apart would crowd the same few places of a cache.
      const int64_t stride = (features + D::kStep - 1) / D::kStep * D::kStep + kLine;
      Wide* wide = scratch<Wide, Factors>(args.tokens * stride);
      parallel_for(args.tokens, kGrain / stride + 1, [=](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) widen(x + i * x_stride, wide + i * stride, features);
      });
      data_ = wide, stride_ = stride;
    } else {
      data_ = x, stride_ = x_stride;
    }
  }

  // Those of the rows from number `first` on.
  Factors from(int64_t first) const {
    Factors rest = *this;
    rest.data_ += first * stride_;
    return rest;
  }
  const Wide* row(int64_t i) const { return data_ + i * stride_; }
  int64_t stride() const { return stride_; }

 private:
  static constexpr int64_t kGrain = 1 << 16, kLine = 64 / sizeof(Wide);  // elements

  static void widen(const T* from, Wide* to, int64_t features) {
    for (int64_t k = 0; k < features; k += D::kStep)
      widen_step(from + k, to + k, static_cast<int>(features - k < D::kStep ? features - k : D::kStep));
  }
  template <int kPart = 0>
  static void widen_step(const T* from, Wide* to, int n) {
    D::template store_wide<kPart>(
        to, n < D::kStep ? D::template load_first<kPart>(from, n) : D::template load<kPart>(from));
    if constexpr (kPart + 1 < D::kParts) widen_step<kPart + 1>(from, to, n);
  }

  const Wide* data_ = nullptr;
  int64_t stride_ = 0;
};

// The factors of kTokens x kTileRows dot products.
template <class T>
struct Tile {
  const typename Dot<T>::Wide* x;  // first token
  int64_t x_stride;
  const T* w[kTileRows];  // the rows' addresses; past the weight's end, its last row again
  const char* ahead;      // memory to prefetch meanwhile
  int64_t features;
};

template <class T, class Out>
struct Result {
  const T* bias;  // of the tile's first row, or null
  Out* y;         // first token, first row
  int64_t y_stride;
  int rows;  // how many of kTileRows exist
};

// A whole step of operands, and the last step where it is not whole.
template <class T>
struct WholeStep {
  template <int kPart>
  static auto x(const typename Dot<T>::Wide* p) {
    return Dot<T>::template load_wide<kPart>(p);
  }
  template <int kPart>
  static auto w(const T* p) {
    return Dot<T>::template load<kPart>(p);
  }
};
template <class T>
struct LastStep {
  int count;
  template <int kPart>
  auto x(const typename Dot<T>::Wide* p) const {
    if constexpr (kWidens<T>) return Dot<T>::template load_wide<kPart>(p);
    if constexpr (!kWidens<T>) return Dot<T>::template load_first<kPart>(p, count);
  }
  template <int kPart>
  auto w(const T* p) const {
    return Dot<T>::template load_first<kPart>(p, count);
  }
};

template <class T, int kTokens>
struct Sums {
  using D = Dot<T>;
  typename D::Sum sums[kTokens][kTileRows];

  inline __attribute__((always_inline)) void clear() {
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < kTileRows; ++j) sums[i][j] = D::zero();
  }
  template <class Step, int kPart = 0>
  inline __attribute__((always_inline)) void add_step(const Tile<T>& tile, int64_t k, const Step& step) {
    typename D::Operand w[kTileRows];
#pragma GCC unroll 8
    for (int j = 0; j < kTileRows; ++j) w[j] = step.template w<kPart>(tile.w[j] + k);
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i) {
      const typename D::Operand x = step.template x<kPart>(tile.x + i * tile.x_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < kTileRows; ++j) sums[i][j] = D::multiply_add(sums[i][j], x, w[j]);
    }
    if constexpr (kPart + 1 < D::kParts) add_step<Step, kPart + 1>(tile, k, step);
  }
};

// Prefetches of one step: kLines of kStep elements each. A whole tile's worth is needed at once, in the first-level
// cache; less than that goes to the second level.
template <class T, int kLines>
inline __attribute__((always_inline)) const char* prefetch(const char* ahead) {
#pragma GCC unroll 8
  for (int i = 0; i < kLines; ++i) {
    __builtin_prefetch(ahead, 0, kLines == kTileRows ? 3 : 2);
    ahead += Dot<T>::kStep * sizeof(T);
  }
  return ahead;
}

template <class T, class Out, int kTokens, int kLines>
void multiply(const Tile<T>& tile, const Result<T, Out>& result) {
  using D = Dot<T>;
  Sums<T, kTokens> all;
  all.clear();
  const char* ahead = tile.ahead;
  int64_t k = 0;
  for (; k + D::kStep <= tile.features; k += D::kStep) {
    ahead = prefetch<T, kLines>(ahead);
    all.add_step(tile, k, WholeStep<T>{});
  }
  const int rest = static_cast<int>(tile.features - k);
  if (rest > 0) all.add_step(tile, k, LastStep<T>{rest});
#pragma GCC unroll 8
  for (int i = 0; i < kTokens; ++i) {
    Vec total = D::reduce4(all.sums[i][0], all.sums[i][1], all.sums[i][2], all.sums[i][3]);
    if (result.bias) total = add(total, load_first(result.bias, result.rows));
    store_first(result.y + i * result.y_stride, total, result.rows);
  }
}

template <class T, class Out, int kTokens, int kLines>
void multiply_some(int64_t tokens, const Tile<T>& tile, const Result<T, Out>& result) {
  if (tokens == kTokens) return multiply<T, Out, kTokens, kLines>(tile, result);
  if constexpr (kTokens > 1) multiply_some<T, Out, kTokens - 1, kLines>(tokens, tile, result);
}

template <class T, class Out>
class DotProducts {
 public:
  using Stored = T;                             // as weights lie
  using Flushed = T;                            // of which denormals may count as zeros
  static constexpr int kBlockRows = kTileRows;  // a block has a multiple of these, but for the weight's last
  static constexpr bool kLongBlocks = true;

  DotProducts(const LinearArgs& args, const Factors<T>& x)
      : args_(args), x_(x), tiles_((args.tokens + kTileTokens - 1) / kTileTokens) {
    const int64_t tile_bytes = kTileTokens * x.stride() * static_cast<int64_t>(sizeof(typename Dot<T>::Wide));
    const int64_t fit = tile_bytes > 0 ? kTokenBytes / tile_bytes : tiles_;
    parts_ = tiles_ > 0 ? (tiles_ - 1) / (fit < kLeastTiles ? kLeastTiles : fit) + 1 : 1;
  }

  const Factors<T>& factors() const { return x_; }

  // Nothing has to be turned.
  static constexpr int64_t kTurnGrain = 1;
  static int64_t tall_rows() { return 0; }
  int64_t row_bytes() const { return args_.features * static_cast<int64_t>(sizeof(T)); }
  int64_t tiles() const { return 0; }
  void turn(int64_t, int64_t) const {}

  // Into how many parts the tokens are cut: as many share a block as the second-level cache holds beside it.
  int64_t parts() const { return parts_; }
  int64_t first_of(int64_t part) const {
    const int64_t token = tiles_ * part / parts_ * kTileTokens;
    return token < args_.tokens ? token : args_.tokens;
  }

  // Meanwhile the memory bus is kept busy with the weights that come next, a little in each step. When all tokens fit
  // in one tile, these are the next tile's rows; else the next block, spread over this block's first tiles.
  void run(const LinearBlock<T, Out>& block, const LinearBlock<T, Out>* next) const {
    const int64_t tile_count = (block.tokens + kTileTokens - 1) / kTileTokens;
    const int lines = tile_count == 1 ? kTileRows : tile_count < 4 ? 2 : 1;
    const int64_t row_bytes = args_.features * sizeof(T);
    const int64_t tile_bytes = lines * row_bytes / Dot<T>::kStep * Dot<T>::kStep;
    const char* ahead = next ? reinterpret_cast<const char*>(next->w) : nullptr;
    const char* end = next ? ahead + next->rows * row_bytes : nullptr;
    for (int64_t t = 0; t < tile_count; ++t) {
      const int64_t first = block.first + block.tokens * t / tile_count;
      const int64_t last = block.first + block.tokens * (t + 1) / tile_count;
      for (int64_t row = 0; row < block.rows; row += kTileRows) {
        if (tile_count == 1 && row + kTileRows < block.rows) {
          const T* below = block.w + (row + kTileRows) * args_.features;
          run_tile(block, first, last, row, reinterpret_cast<const char*>(below), lines);
        } else {
          run_tile(block, first, last, row, ahead, ahead < end ? lines : 0);
          ahead += tile_bytes;
        }
      }
    }
  }

 private:
  static constexpr int64_t kTokenBytes = 512 << 10, kLeastTiles = 8;

  void run_tile(const LinearBlock<T, Out>& block, int64_t first, int64_t last, int64_t row, const char* ahead,
                int lines) const {
    const int count = static_cast<int>(block.rows - row < kTileRows ? block.rows - row : kTileRows);
    Tile<T> tile{x_.row(first), x_.stride(), {}, ahead, args_.features};
    for (int j = 0; j < kTileRows; ++j) tile.w[j] = block.w + (row + (j < count ? j : count - 1)) * args_.features;
    const Result<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + first * block.y_stride + row,
                                block.y_stride, count};
    if (lines == 0) return multiply_some<T, Out, kTileTokens, 0>(last - first, tile, result);
    if (lines == 1) return multiply_some<T, Out, kTileTokens, 1>(last - first, tile, result);
    if (lines == 2) return multiply_some<T, Out, kTileTokens, 2>(last - first, tile, result);
    multiply_some<T, Out, kTileTokens, kTileRows>(last - first, tile, result);
  }

  const LinearArgs& args_;
  const Factors<T> x_;
  const int64_t tiles_;  // of the tokens
  int64_t parts_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

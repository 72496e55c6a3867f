// The linear kernel on vector registers: kTileTokens x kTileRows dot products at a time, on operands as they lie.
#pragma once

#include "dot.h"
#include "linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// The factors of kTokens x kTileRows dot products.
template <class T>
struct Tile {
  const T* x;  // first token
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
  template <class Load>
  inline __attribute__((always_inline)) void add_step(const Tile<T>& tile, int64_t k, const Load& load) {
    typename D::Operand w[kTileRows];
#pragma GCC unroll 8
    for (int j = 0; j < kTileRows; ++j) w[j] = load(tile.w[j] + k);
#pragma GCC unroll 8
    for (int i = 0; i < kTokens; ++i) {
      const typename D::Operand x = load(tile.x + i * tile.x_stride + k);
#pragma GCC unroll 8
      for (int j = 0; j < kTileRows; ++j) sums[i][j] = D::multiply_add(sums[i][j], x, w[j]);
    }
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
    all.add_step(tile, k, [](const T* p) { return D::load(p); });
  }
  const int rest = static_cast<int>(tile.features - k);
  if (rest > 0) all.add_step(tile, k, [rest](const T* p) { return D::load_first(p, rest); });
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
  static constexpr int kBlockRows = kTileRows;  // a block has a multiple of these, but for the weight's last

  explicit DotProducts(const LinearArgs& args) : args_(args) {}

  // Meanwhile the memory bus is kept busy with the weights that come next, a little in each step. When all tokens fit
  // in one tile, these are the next tile's rows; else the next block, spread over this block's first tiles.
  void run(const LinearBlock<T, Out>& block, const LinearBlock<T, Out>* next) const {
    const int64_t tile_count = (args_.tokens + kTileTokens - 1) / kTileTokens;
    const int lines = tile_count == 1 ? kTileRows : tile_count < 4 ? 2 : 1;
    const int64_t row_bytes = args_.features * sizeof(T);
    const int64_t tile_bytes = lines * row_bytes / Dot<T>::kStep * Dot<T>::kStep;
    const char* ahead = next ? reinterpret_cast<const char*>(next->w) : nullptr;
    const char* end = next ? ahead + next->rows * row_bytes : nullptr;
    for (int64_t t = 0; t < tile_count; ++t) {
      const int64_t first = args_.tokens * t / tile_count, last = args_.tokens * (t + 1) / tile_count;
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
  void run_tile(const LinearBlock<T, Out>& block, int64_t first, int64_t last, int64_t row, const char* ahead,
                int lines) const {
    const int count = static_cast<int>(block.rows - row < kTileRows ? block.rows - row : kTileRows);
    Tile<T> tile{static_cast<const T*>(args_.x) + first * args_.x_stride, args_.x_stride, {}, ahead, args_.features};
    for (int j = 0; j < kTileRows; ++j) tile.w[j] = block.w + (row + (j < count ? j : count - 1)) * args_.features;
    const Result<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + first * block.y_stride + row,
                                block.y_stride, count};
    if (lines == 0) return multiply_some<T, Out, kTileTokens, 0>(last - first, tile, result);
    if (lines == 1) return multiply_some<T, Out, kTileTokens, 1>(last - first, tile, result);
    if (lines == 2) return multiply_some<T, Out, kTileTokens, 2>(last - first, tile, result);
    multiply_some<T, Out, kTileTokens, kTileRows>(last - first, tile, result);
  }

  const LinearArgs& args_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// y = x W^T + b for a list of weights, on row-major weights as they lie in a safetensors file.
//
// Every output element is one dot product along K with one fixed chain of additions: kStep elements at a time into
// the lanes of one register, then the lanes by a fixed tree, then the bias. Tiles only decide which dot products share
// registers. So no element depends on the other tokens, the other weights, or the number of threads.
#include "dot.h"
#include "kernels.h"
#include "parallel.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// A block of rows is what one thread takes at a time: about this much of a weight, which stays in its second-level
// cache while all tokens pass, next to the following block that is being prefetched.
constexpr int64_t kBlockBytes = 64 << 10, kMaxBlockRows = 64;
// What is worth waking another thread for: this many multiplications, where fetching a weight from memory counts as
// eight of them. About 10 microseconds.
constexpr int64_t kThreadWork = 1 << 20, kFetchWork = 8;

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
struct Block {
  const LinearArgs* args;
  const T* w;
  const T* bias;
  Out* y;
  int64_t y_stride, rows;

  // Meanwhile the memory bus is kept busy with the weights that come next, a little in each step. When all tokens fit
  // in one tile, these are the next tile's rows; else the next block, spread over this block's first tiles.
  void run(const Block* next) const {
    const int64_t tile_count = (args->tokens + kTileTokens - 1) / kTileTokens;
    const int lines = tile_count == 1 ? kTileRows : tile_count < 4 ? 2 : 1;
    const int64_t row_bytes = args->features * sizeof(T);
    const int64_t tile_bytes = lines * row_bytes / Dot<T>::kStep * Dot<T>::kStep;
    const char* ahead = next ? reinterpret_cast<const char*>(next->w) : nullptr;
    const char* end = next ? ahead + next->rows * row_bytes : nullptr;
    for (int64_t t = 0; t < tile_count; ++t) {
      const int64_t first = args->tokens * t / tile_count, last = args->tokens * (t + 1) / tile_count;
      for (int64_t row = 0; row < rows; row += kTileRows) {
        if (tile_count == 1 && row + kTileRows < rows) {
          run_tile(first, last, row, reinterpret_cast<const char*>(w + (row + kTileRows) * args->features), lines);
        } else {
          run_tile(first, last, row, ahead, ahead < end ? lines : 0);
          ahead += tile_bytes;
        }
      }
    }
  }

  void run_tile(int64_t first, int64_t last, int64_t row, const char* ahead, int lines) const {
    const int count = static_cast<int>(rows - row < kTileRows ? rows - row : kTileRows);
    Tile<T> tile{static_cast<const T*>(args->x) + first * args->x_stride, args->x_stride, {}, ahead, args->features};
    for (int j = 0; j < kTileRows; ++j) tile.w[j] = w + (row + (j < count ? j : count - 1)) * args->features;
    const Result<T, Out> result{bias ? bias + row : nullptr, y + first * y_stride + row, y_stride, count};
    if (lines == 0) return multiply_some<T, Out, kTileTokens, 0>(last - first, tile, result);
    if (lines == 1) return multiply_some<T, Out, kTileTokens, 1>(last - first, tile, result);
    if (lines == 2) return multiply_some<T, Out, kTileTokens, 2>(last - first, tile, result);
    multiply_some<T, Out, kTileTokens, kTileRows>(last - first, tile, result);
  }
};

// Block number `index` of those that the weights are cut into.
template <class T, class Out>
Block<T, Out> block_at(const LinearArgs& args, int64_t block_rows, int64_t total_rows, int64_t index) {
  Out* y = static_cast<Out*>(args.y);
  const Weight* weight = args.weights;
  for (;; ++weight) {
    const int64_t count = (weight->rows + block_rows - 1) / block_rows;
    if (index < count) break;
    index -= count;
    y += weight->rows;
  }
  const int64_t row = index * block_rows, left = weight->rows - row;
  const T* bias = static_cast<const T*>(weight->bias);
  return {&args, static_cast<const T*>(weight->data) + row * args.features, bias ? bias + row : nullptr,
          y + row, total_rows, left < block_rows ? left : block_rows};
}


template <class T, class Out>
void linear_as(const LinearArgs& args) {
  const int64_t row_bytes = (args.features > 0 ? args.features : 1) * sizeof(T);
  int64_t block_rows = kBlockBytes / row_bytes / kTileRows * kTileRows;
  block_rows = block_rows < kTileRows ? kTileRows : block_rows > kMaxBlockRows ? kMaxBlockRows : block_rows;
  int64_t blocks = 0, total_rows = 0;
  for (int64_t i = 0; i < args.count; ++i) {
    blocks += (args.weights[i].rows + block_rows - 1) / block_rows;
    total_rows += args.weights[i].rows;
  }
  if (args.tokens == 0) return;
  const int64_t team = 1 + total_rows * args.features * (args.tokens + kFetchWork) / kThreadWork;
  parallel_for_ahead(blocks, team, [&](int64_t index, int64_t next_index) {
    const Block<T, Out> block = block_at<T, Out>(args, block_rows, total_rows, index);
    if (next_index < 0) return block.run(nullptr);
    const Block<T, Out> next = block_at<T, Out>(args, block_rows, total_rows, next_index);
    block.run(&next);
  });
}

template <class T>
void linear_of(const LinearArgs& args) {
  if (args.out_dtype == DType::float32) return linear_as<T, float>(args);
  linear_as<T, T>(args);
}

}  // namespace

void linear(const LinearArgs& args) {
  switch (args.dtype) {
    case DType::float32: return linear_of<float>(args);
    case DType::bfloat16: return linear_of<bf16>(args);
    case DType::float16: return linear_of<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

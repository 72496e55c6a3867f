// How a call of a linear kernel is cut into blocks, which threads take one by one.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/linear/linear_block.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// A block is about this much of a weight, which stays in its thread's second-level cache while all tokens pass, next
// to the following block that is being prefetched. While memory is the limit, longer runs are read faster, as long as
// every thread has a few of them.
constexpr int64_t kBlockBytes = 64 << 10, kLongBlockBytes = 256 << 10, kFewTokens = 64, kBlocksEach = 8;
constexpr int64_t kShortBlocks = 4;  // in which a long one is cut at the end
// What is worth waking another thread for: this many multiplications, where fetching a weight from memory counts as
// kFetchWork of them. About 10 microseconds.
constexpr int64_t kThreadWork = 1 << 20;

// How a call is cut: its tokens into `products.parts()`, and for each of them the weights into `blocks`, of which so
// many last ones are short: threads end together then.
struct Cut {
  int64_t blocks, block_rows, total_rows;
  int64_t long_blocks, short_rows;  // of the last weight

  Cut(const LinearArgs& args, int64_t rows, int64_t step, int64_t tail_blocks)
      : blocks(0), block_rows(rows), total_rows(0) {
    for (int64_t i = 0; i < args.count; ++i) {
      total_rows += args.weights[i].rows;
      if (i + 1 < args.count) blocks += (args.weights[i].rows + rows - 1) / rows;
    }
    const int64_t last = args.weights[args.count - 1].rows, whole = last / rows;
    const int64_t tail = whole < tail_blocks ? whole : tail_blocks;
    short_rows = rows / kShortBlocks / step * step;
    if (short_rows < step) short_rows = step;
    long_blocks = whole - tail;
    blocks += long_blocks + (last - long_blocks * rows + short_rows - 1) / short_rows;
  }
};

// Block number `index`, a part's blocks after those of the part before.
template <class T, class Out, class Products>
LinearBlock<T, Out, typename Products::Stored> block_at(const LinearArgs& args, const Products& products,
                                                        const Cut& cut, int64_t index) {
  Out* y = static_cast<Out*>(args.y);
  const int64_t part = index / cut.blocks, block_rows = cut.block_rows;
  const int64_t first = products.first_of(part), tokens = products.first_of(part + 1) - first;
  index %= cut.blocks;
  const Weight *weight = args.weights, *last = args.weights + args.count - 1;
  for (; weight < last; ++weight) {
    const int64_t count = (weight->rows + block_rows - 1) / block_rows;
    if (index < count) break;
    index -= count;
    y += weight->rows;
  }
  int64_t row = index * block_rows, rows = block_rows;
  if (weight == last && index >= cut.long_blocks)
    row = cut.long_blocks * block_rows + (index - cut.long_blocks) * cut.short_rows, rows = cut.short_rows;
  const int64_t left = weight->rows - row;
  const T* bias = static_cast<const T*>(weight->bias);
  const int64_t number = weight - args.weights;
  const int64_t row_size = args.formats ? args.formats[number].row_bytes : args.features;
  return {static_cast<const typename Products::Stored*>(weight->data) + row * row_size,
          bias ? bias + row : nullptr,
          y + row,
          args.y_stride > 0 ? args.y_stride : cut.total_rows,
          left < rows ? left : rows,
          part,
          first,
          tokens,
          number};
}

inline int64_t rows_of(const LinearArgs& args) {
  int64_t total = 0;
  for (int64_t i = 0; i < args.count; ++i) total += args.weights[i].rows;
  return total;
}

// total_rows: of all weights that the threads have to do. row_bytes: of what a thread keeps of a row while it
// multiplies. step: a block has a multiple of these rows, but for a weight's last. tall_rows: how many it may have where
// what the tokens take is read again for each block; 0 where it is not.
inline int64_t rows_of_block(const LinearArgs& args, int64_t total_rows, bool may_be_long, int64_t row_bytes,
                             int64_t step, int64_t tall_rows) {
  if (row_bytes < 1) row_bytes = 1;
  if (tall_rows > 0) {
    const int64_t share = total_rows / max_threads();
    return (share < step ? step : share > tall_rows ? tall_rows : share) / step * step;
  }
  int64_t bytes = kBlockBytes;
  if (may_be_long && args.tokens <= kFewTokens) {
    const int64_t share = total_rows * row_bytes / (kBlocksEach * max_threads());
    bytes = share < kBlockBytes ? kBlockBytes : share > kLongBlockBytes ? kLongBlockBytes : share;
  }
  const int64_t most = bytes / 1024;  // rows shorter than that: blocks stay a matter of microseconds
  const int64_t rows = bytes / row_bytes < most ? bytes / row_bytes : most;
  return rows < step ? step : rows / step * step;
}

// What products need of the tokens before they run: see their `turn`.
template <class Products>
void turn_tokens(Products& products) {
  parallel_for(products.tiles(), Products::kTurnGrain, [&](int64_t begin, int64_t end) { products.turn(begin, end); });
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// y = x W^T + b for a list of weights, on row-major weights as they lie in a safetensors file.
//
// Every output element is one dot product along K with one fixed chain of additions (the vector unit's or the matrix
// unit's, by element type and instruction set alone), then the bias. Tiles only decide which dot products share
// registers. So no element depends on the other tokens, the other weights, or the number of threads.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/linear/linear_amx.h"
#include "cpu/linear/linear_dot.h"
#include "cpu/linear/linear_outer.h"
#include "cpu/linear/lora.h"

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

// Where a block stands: its weight's number and its first row of it.
struct Place {
  int64_t weight, row;
};

// How a call is cut: its tokens into `products.parts()`, and for each of them the weights into `blocks`, of which the
// last ones are short: threads end together then.
struct Cut {
  int64_t blocks, block_rows, total_rows;
  int64_t long_blocks, short_rows;  // of the last weight

  Cut(const LinearArgs& args, int64_t rows, int64_t step) : blocks(0), block_rows(rows), total_rows(0) {
    for (int64_t i = 0; i < args.count; ++i) {
      total_rows += args.weights[i].rows;
      if (i + 1 < args.count) blocks += (args.weights[i].rows + rows - 1) / rows;
    }
    const int64_t last = args.weights[args.count - 1].rows, whole = last / rows;
    const int64_t tail = whole < max_threads() ? whole : max_threads();
    short_rows = rows / kShortBlocks / step * step;
    if (short_rows < step) short_rows = step;
    long_blocks = whole - tail;
    blocks += long_blocks + (last - long_blocks * rows + short_rows - 1) / short_rows;
  }
};

// Block number `index`, a part's blocks after those of the part before.
template <class T, class Out, class Products>
LinearBlock<T, Out> block_at(const LinearArgs& args, const Products& products, const Cut& cut, int64_t index,
                             Place* place = nullptr) {
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
  if (place) *place = {weight - args.weights, row};
  return {static_cast<const T*>(weight->data) + row * args.features,
          bias ? bias + row : nullptr,
          y + row,
          cut.total_rows,
          left < rows ? left : rows,
          part,
          first,
          tokens};
}

// step: a block has a multiple of these rows, but for a weight's last.
int64_t rows_of_block(const LinearArgs& args, bool may_be_long, int64_t element_bytes, int64_t step) {
  const int64_t row_bytes = (args.features > 0 ? args.features : 1) * element_bytes;
  int64_t bytes = kBlockBytes;
  if (may_be_long && args.tokens <= kFewTokens) {
    int64_t total_rows = 0;
    for (int64_t i = 0; i < args.count; ++i) total_rows += args.weights[i].rows;
    const int64_t share = total_rows * row_bytes / (kBlocksEach * max_threads());
    bytes = share < kBlockBytes ? kBlockBytes : share > kLongBlockBytes ? kLongBlockBytes : share;
  }
  const int64_t most = bytes / 1024;  // rows shorter than that: blocks stay a matter of microseconds
  const int64_t rows = bytes / row_bytes < most ? bytes / row_bytes : most;
  return rows < step ? step : rows / step * step;
}

template <class T, class Out, class Products>
void linear_by(const LinearArgs& args, const Products& products, Adapters<T, Out>& adapters) {
  const int64_t step = adapters.none() ? Products::kBlockRows : kLoraColumns;
  const Cut cut(args, rows_of_block(args, Products::kLongBlocks, sizeof(T), step), step);
  const int64_t work = cut.total_rows * args.features * (args.tokens + kFetchWork) + adapters.work();
  const int64_t team = 1 + work / kThreadWork;
  const int64_t shrinks = adapters.shrink_items();  // these come first, since what follows waits for them
  parallel_for_ahead(shrinks + products.parts() * cut.blocks, team, [&](int64_t index, int64_t next_index) {
    if (index < shrinks) return adapters.run_shrink(index);
    Place place;
    const LinearBlock<T, Out> block = block_at<T, Out>(args, products, cut, index - shrinks, &place);
    if (next_index < 0) {
      products.run(block, nullptr);
    } else {
      const LinearBlock<T, Out> next = block_at<T, Out>(args, products, cut, next_index - shrinks);
      products.run(block, &next);
    }
    if (!adapters.none()) adapters.run_expand(place.weight, place.row, block);
  });
}

template <class T, class Out>
void linear_as(const LinearArgs& args) {
  if (args.tokens == 0 || args.count == 0) return;
#if defined(__AMX_BF16__)
  if constexpr (__is_same(T, bf16)) {
    Adapters<T, Out> adapters(args, Factors<T>(args));
    return linear_by(args, MatrixProducts<Out>(args), adapters);
  }
#endif
  if constexpr (Dot<T>::kHasUnits) {
    if (OuterProducts<T, Out>::suits(args)) {
      Adapters<T, Out> adapters(args, args.num_segments > 0 ? Factors<T>(args) : Factors<T>());
      return linear_by(args, OuterProducts<T, Out>(args), adapters);
    }
  }
  const Factors<T> x(args);
  Adapters<T, Out> adapters(args, x);
  linear_by(args, DotProducts<T, Out>(args, x), adapters);
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

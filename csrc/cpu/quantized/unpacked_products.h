// Products of floats with quantized weights: a block's rows are unpacked into elements of x's dtype, in the thread's own
// memory, and go the way of all floats from there. So the bits are those of the linear kernel on unpacked weights.
#pragma once

#include "cpu/linear/linear_run.h"
#include "cpu/quantized/unpack.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Products: of linear/, whose blocks are elements.
template <class Products>
class Unpacked : public Products {
  using Element = typename Products::Stored;

 public:
  using Stored = uint8_t;
  using Flushed = float;  // unpacking has its denormals
  static constexpr bool kLongBlocks = false;
  static int64_t tall_rows() { return 0; }  // they lie in memory of a block's size

  template <class Memory>
  Unpacked(const LinearArgs& args, const Memory& memory) : Products(args, memory), args_(args) {}

  template <class T, class Out, class Next>
  void run(const LinearBlock<T, Out, uint8_t>& block, const Next&) const {
    const RowFormat& format = args_.formats[block.weight];
    const int64_t features = args_.features;
    if constexpr (__is_same(Products, DotProducts<T, Out>)) {
      if (block.tokens <= kTileTokens &&
          with_codes(format, [&](auto kind) { run_few<kTileTokens>(kind, format, block); }))
        return;
    }
    Element* rows = scratch<Element, Unpacked>(block.rows * features);
    unpack_rows(format, block.w, block.rows, features, rows);
    const LinearBlock<T, Out> unpacked{rows,       block.bias,  block.y,      block.y_stride, block.rows,
                                       block.part, block.first, block.tokens, block.weight};
    const FlushDenormals<typename Products::Flushed> flush;
    Products::run(unpacked, nullptr);
  }

 private:
  static constexpr int64_t kColumns = 512;  // a multiple of every kStep

  // Whose denormals count as zeros while sums are made: vdpbf16ps needs not be told.
  template <class T, bool kToldAnyhow = __is_same(T, bf16)>
  struct InSumsOf {
    using Type = T;
  };
  template <class T>
  struct InSumsOf<T, true> {
    using Type = float;
  };
  template <class T>
  using InSums = typename InSumsOf<T>::Type;

  template <int kTokens, class Kind, class T, class Out>
  void run_few(Kind kind, const RowFormat& format, const LinearBlock<T, Out, uint8_t>& block) const {
    if constexpr (kTokens > 1)
      if (block.tokens < kTokens) return run_few<kTokens - 1>(kind, format, block);
    for (int64_t row = 0; row < block.rows; row += kTileRows) multiply_few<kTokens, Kind>(format, block, row);
  }

  // For a tile of tokens or less: a few columns at a time are unpacked, and multiplied while they are in the first-level
  // cache. The sums are those of `multiply` in linear_dot.h.
  template <int kTokens, class Kind, class T, class Out>
  void multiply_few(const RowFormat& format, const LinearBlock<T, Out, uint8_t>& block, int64_t row) const {
    using D = Dot<T>;
    const Factors<T>& x = this->factors();
    const int64_t features = args_.features;
    const int count = static_cast<int>(block.rows - row < kTileRows ? block.rows - row : kTileRows);
    alignas(64) T columns[kTileRows][kColumns];
    Tile<T> tile{nullptr, x.stride(), {}, nullptr, features};
    for (int j = 0; j < kTileRows; ++j) tile.w[j] = columns[j < count ? j : count - 1];
    Sums<T, kTokens> all;
    all.clear();
    for (int64_t first = 0; first < features; first += kColumns) {
      const int64_t end = features - first < kColumns ? features : first + kColumns;
      for (int j = 0; j < count; ++j)
        Kind::columns(format, block.w + (row + j) * format.row_bytes, features, first, end, columns[j]);
      tile.x = x.row(block.first) + first;
      const FlushDenormals<InSums<T>> flush;
      int64_t k = 0;
      for (; k + D::kStep <= end - first; k += D::kStep) all.add_step(tile, k, WholeStep<T>{});
      const int rest = static_cast<int>(end - first - k);
      if (rest > 0) all.add_step(tile, k, LastStep<T>{rest});
    }
    const FlushDenormals<typename Products::Flushed> flush;
    for (int i = 0; i < kTokens; ++i) {
      Vec total = D::reduce4(all.sums[i][0], all.sums[i][1], all.sums[i][2], all.sums[i][3]);
      if (block.bias) total = add(total, load_first(block.bias + row, count));
      store_first(block.y + (block.first + i) * block.y_stride + row, total, count);
    }
  }

  const LinearArgs& args_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

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

  template <class Memory>
  Unpacked(const LinearArgs& args, const Memory& memory) : Products(args, memory), args_(args) {}

  template <class T, class Out, class Next>
  void run(const LinearBlock<T, Out, uint8_t>& block, const Next&) const {
    const RowFormat& format = args_.formats[block.weight];
    Element* rows = scratch<Element, Unpacked>(block.rows * args_.features);
    for (int64_t row = 0; row < block.rows; ++row)
      unpack_row(format, block.w + row * format.row_bytes, args_.features, rows + row * args_.features);
    const LinearBlock<T, Out> unpacked{rows,       block.bias,  block.y,      block.y_stride, block.rows,
                                       block.part, block.first, block.tokens, block.weight};
    const FlushDenormals<typename Products::Flushed> flush;
    Products::run(unpacked, nullptr);
  }

 private:
  const LinearArgs& args_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

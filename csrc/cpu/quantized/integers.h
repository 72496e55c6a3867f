// Which products of whole numbers an instruction set has, for a few tokens and for many.
#pragma once

#include "cpu/quantized/integer_products.h"
#include "cpu/quantized/panels.h"
#include "cpu/quantized/row_products.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

#if defined(QUIRE_WIDE)
template <class T, class Out, bool kWholeRows>
struct Integers {
  using Products = GroupProducts<T, Out>;
  using OfMany = PanelProducts<T, Out>;
  // MXFP4's offset is no power of two, which each token of a step pays for.
  static bool many(const LinearArgs& args) {
    int64_t most = kStepTokens;
    for (int64_t i = 0; i < args.count; ++i)
      if (args.formats[i].kind == RowKind::mxfp4) most = 4;
    return args.tokens > most;
  }
};
template <class T, class Out>
struct Integers<T, Out, true> {
  using Products = RowProducts<T, Out>;
  using OfMany = Products;
  static bool many(const LinearArgs&) { return false; }
};
#else
template <class T, class Out, bool kWholeRows>
struct Integers {
  using Products = IntegerProducts<T, Out, kWholeRows>;
  using OfMany = Products;
  static bool many(const LinearArgs&) { return false; }
};
#endif

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

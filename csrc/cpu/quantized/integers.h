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
  static bool many(int64_t tokens) { return tokens > kStepTokens; }
};
template <class T, class Out>
struct Integers<T, Out, true> {
  using Products = RowProducts<T, Out>;
  using OfMany = Products;
  static bool many(int64_t) { return false; }
};
#else
template <class T, class Out, bool kWholeRows>
struct Integers {
  using Products = IntegerProducts<T, Out, kWholeRows>;
  using OfMany = Products;
  static bool many(int64_t) { return false; }
};
#endif

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// Products of weights that are whole numbers, in groups or with one scale a row, with x in int8.
//
// Compiled with the products of bytes that some processors of an instruction set have and others have not: a set of its
// own for each, all of whose other kernels are another's (isa.h).
#include "cpu/common/kernels.h"
#include "cpu/linear/linear_run.h"
#include "cpu/quantized/integers.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

template <class Products, class T, class Out>
void integer_by(const LinearArgs& args, Adapters<T, Out>& adapters) {
  const Products products(args);
  turn_tokens(products);
  linear_by(args, products, adapters);
}

template <class T, class Out, bool kWholeRows>
void integer_as(const LinearArgs& args) {
  if (args.tokens == 0) return;
  Adapters<T, Out> adapters = adapters_of<T, Out>(args, args.num_segments > 0 ? Factors<T>(args) : Factors<T>());
  using Ways = Integers<T, Out, kWholeRows>;
  if (Ways::many(args)) return integer_by<typename Ways::OfMany>(args, adapters);
  integer_by<typename Ways::Products>(args, adapters);
}

template <class T, bool kWholeRows>
void integer_of(const LinearArgs& args) {
  if (args.out_dtype == DType::float32) return integer_as<T, float, kWholeRows>(args);
  integer_as<T, T, kWholeRows>(args);
}

template <class T>
void integer_from(const LinearArgs& args) {
  if (args.formats->kind == RowKind::int8_rows) return integer_of<T, true>(args);
  integer_of<T, false>(args);
}

}  // namespace

void integer_linear(const LinearArgs& args) {
  switch (args.dtype) {
    case DType::float32: return integer_from<float>(args);
    case DType::bfloat16: return integer_from<bf16>(args);
    case DType::float16: return integer_from<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

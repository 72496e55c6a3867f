// y = x W^T + b for a list of weights whose rows are bytes, each of a format of its own.
//
// There are three ways: elements of x's own dtype are the linear kernel's; whole numbers in groups, or one scale a row,
// are multiplied by x in int8; all others become elements of x's dtype first. Neighbours in the list that go the same way
// go together.
#include "cpu/common/kernels.h"
#include "cpu/quantized/integer_avx512.h"
#include "cpu/quantized/integer_products.h"
#include "cpu/quantized/panels_avx512.h"
#include "cpu/quantized/unpacked_products.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

enum class Way { elements, unpacked, groups, rows };

inline Way way_of(RowKind kind, DType dtype) {
  switch (kind) {
    case RowKind::f32: return dtype == DType::float32 ? Way::elements : Way::unpacked;
    case RowKind::f16: return dtype == DType::float16 ? Way::elements : Way::unpacked;
    case RowKind::bf16: return dtype == DType::bfloat16 ? Way::elements : Way::unpacked;
    case RowKind::affine4:
    case RowKind::affine8:
    case RowKind::table4:
    case RowKind::table8: return Way::unpacked;
    case RowKind::int8_rows: return Way::rows;
    default: return Way::groups;
  }
}

#if defined(__AVX512VNNI__)
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
  if (Ways::many(args.tokens)) return integer_by<typename Ways::OfMany>(args, adapters);
  integer_by<typename Ways::Products>(args, adapters);
}

template <class T, bool kWholeRows>
void integer_of(const LinearArgs& args) {
  if (args.out_dtype == DType::float32) return integer_as<T, float, kWholeRows>(args);
  integer_as<T, T, kWholeRows>(args);
}

template <class T>
void run_by(Way way, const LinearArgs& args) {
  switch (way) {
    case Way::elements: return linear(args);
    case Way::unpacked: return linear_of<T, Unpacked>(args);
    case Way::groups: return integer_of<T, false>(args);
    case Way::rows: return integer_of<T, true>(args);
  }
}

}  // namespace

void quantized_linear(const LinearArgs& args) {
  const int64_t out_bytes = args.out_dtype == DType::float32 ? 4 : 2;
  LinearArgs run = args;
  run.y_stride = rows_of(args);
  for (int64_t first = 0, column = 0; first < args.count; first += run.count) {
    const Way way = way_of(args.formats[first].kind, args.dtype);
    run.count = 1;
    while (first + run.count < args.count && way_of(args.formats[first + run.count].kind, args.dtype) == way)
      ++run.count;
    run.y = static_cast<char*>(args.y) + column * out_bytes;
    run.weights = args.weights + first, run.tables = args.tables + first;
    run.formats = way == Way::elements ? nullptr : args.formats + first;
    column += rows_of(run);
    switch (args.dtype) {
      case DType::float32: run_by<float>(way, run); break;
      case DType::bfloat16: run_by<bf16>(way, run); break;
      case DType::float16: run_by<fp16>(way, run); break;
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

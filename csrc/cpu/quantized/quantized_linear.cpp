// y = x W^T + b for a list of weights whose rows are bytes, each of a format of its own.
//
// There are three ways: elements of x's own dtype are the linear kernel's; whole numbers in groups, or one scale a row,
// are multiplied by x in int8; all others become elements of x's dtype first. Neighbours in the list that go the same way
// go together.
#include "cpu/quantized/quantized_linear.h"

namespace quire {
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

void run_by(const Isa& isa, Way way, const LinearArgs& args) {
  switch (way) {
    case Way::elements: return isa.kernels->linear(args);
    case Way::unpacked: return isa.kernels->unpacked_linear(args);
    case Way::groups:
    case Way::rows: return isa.integer_linear(args);
  }
}

}  // namespace

void multiply_quantized(const Isa& isa, const LinearArgs& args) {
  const int64_t out_bytes = args.out_dtype == DType::float32 ? 4 : 2;
  LinearArgs run = args;
  run.y_stride = 0;
  for (int64_t i = 0; i < args.count; ++i) run.y_stride += args.weights[i].rows;
  for (int64_t first = 0, column = 0; first < args.count; first += run.count) {
    const Way way = way_of(args.formats[first].kind, args.dtype);
    run.y = static_cast<char*>(args.y) + column * out_bytes;
    run.weights = args.weights + first, run.tables = args.tables + first;
    run.formats = way == Way::elements ? nullptr : args.formats + first;
    run.count = 0;
    while (first + run.count < args.count && way_of(args.formats[first + run.count].kind, args.dtype) == way)
      column += args.weights[first + run.count++].rows;
    run_by(isa, way, run);
  }
}

}  // namespace quire

// y = x W^T + b for a list of weights whose rows are bytes, each of a format of its own.
//
// Neighbours in the list that go the same way go together. Of experts, all that go the same way do.
#include "cpu/quantized/quantized_linear.h"

#include "cpu/common/ways.h"

namespace quire {
namespace {

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

void multiply_quantized_experts(const Isa& isa, const GroupedLinearArgs& args) {
  if (args.rows == 0) return;
  bool elements = false, unpacked = false, integers = false;
  for (const RowFormat* format = args.formats; format < args.formats + args.experts * args.count; ++format) {
    const Way way = way_of(format->kind, args.dtype);
    elements |= way == Way::elements, unpacked |= way == Way::unpacked, integers |= is_integer(way);
  }
  if (elements) isa.kernels->grouped_linear(args);
  if (unpacked) isa.kernels->unpacked_grouped_linear(args);
  if (integers) isa.integer_grouped_linear(args);
}

}  // namespace quire

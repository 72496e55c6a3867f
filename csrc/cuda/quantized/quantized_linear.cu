// y = x W^T + bias of weights whose rows are bytes: weight-only. Whatever x's dtype T, the bits are those of `linear` with
// every number of W as a T, rounded once; so they do not depend on how many tokens share the call.
//
// Few tokens: a kind's own kernels unpack rows on their way into registers, or shared memory. Many tokens: some rows at a
// time are unpacked to memory, and `linear`'s own kernels multiply them; so are rows that no kernel reads.
#include "cuda/quantized/quantized.h"

namespace quire::cuda {
namespace {

// From so many tokens on, what unpacking takes is little beside the products, and what it takes in every tile is not.
#ifdef QUIRE_CUDA_EMULATION
constexpr int64_t kManyTokens = 48;
#else
constexpr int64_t kManyTokens = 129;
#endif
constexpr int64_t kMostUnpacked = 64 << 20;  // bytes of memory

enum class Way { elements, kernels, unpacked };

Way way_of(const LinearArgs& args, int64_t i) {
  const RowKind kind = args.formats[i].kind;
  if ((kind == RowKind::f32 && args.dtype == DType::float32) ||
      (kind == RowKind::f16 && args.dtype == DType::float16) ||
      (kind == RowKind::bf16 && args.dtype == DType::bfloat16))
    return Way::elements;
  if (args.dtype == DType::float32) return Way::kernels;
  return args.tokens < kManyTokens && has_products(kind, layout_of(args.formats[i], args.features)) ? Way::kernels
                                                                                                    : Way::unpacked;
}

int64_t row_size(const LinearArgs& args) { return args.features * (args.dtype == DType::float32 ? 4 : 2); }

// Some rows at a time.
int64_t rows_at_once(const LinearArgs& args, const Weight& weight) {
  const int64_t rows = kMostUnpacked / std::max(row_size(args), int64_t{1}) / 128 * 128;
  return std::min(weight.rows, std::max(rows, int64_t{128}));
}

Launch launch_of(const LinearArgs& args) {
  Launch launch{};
  launch.x = args.x, launch.y = args.y;
  launch.tokens = static_cast<int>(args.tokens), launch.features = static_cast<int>(args.features);
  launch.x_stride = args.x_stride;
  launch.float_out = args.out_dtype == DType::float32;
  for (int64_t i = 0; i < args.count; ++i) launch.columns += args.weights[i].rows;
  return launch;
}

void multiply_elements(const LinearArgs& args, Launch launch, const Product& product, Stream stream) {
  launch.count = 1, launch.products[0] = product;
  const bool wide = args.features % 8 == 0 && are_aligned(args.x, product.data);
  start_products(launch, args.dtype, wide && (args.x_stride % 8 == 0 || args.tokens == 1), stream);
}

void multiply_unpacked(const LinearArgs& args, const Launch& launch, int64_t i, int64_t column, void* memory,
                       Stream stream) {
  const Weight& weight = args.weights[i];
  const int64_t step = rows_at_once(args, weight), element = args.dtype == DType::float32 ? 4 : 2;
  for (int64_t first = 0; first < weight.rows; first += step) {
    const int64_t rows = std::min(step, weight.rows - first);
    unpack_rows(weight.data, args.formats[i], args.features, first, rows, memory, args.dtype, stream);
    const char* bias = weight.bias ? static_cast<const char*>(weight.bias) + first * element : nullptr;
    multiply_elements(args, launch, {memory, bias, rows, column + first}, stream);
  }
}

void multiply_by_kernels(const LinearArgs& args, RowKind kind, const QuantizedCall& call, Stream stream) {
  args.dtype == DType::float32 ? launch_floats(kind, call, stream) : launch_products(kind, args.dtype, call, stream);
}

}  // namespace

int64_t quantized_workspace(const LinearArgs& args) {
  int64_t rows = 0;
  for (int64_t i = 0; i < args.count && args.tokens > 0; ++i)
    if (way_of(args, i) == Way::unpacked) rows = std::max(rows, rows_at_once(args, args.weights[i]));
  return rows * row_size(args);
}

void quantized_linear(const LinearArgs& args, void* workspace, Stream stream) {
  if (args.tokens == 0) return;
  const Launch shape = launch_of(args);
  int64_t column = 0;
  for (int64_t i = 0; i < args.count;) {
    const Way way = way_of(args, i);
    const Weight& weight = args.weights[i];
    if (way != Way::kernels) {
      if (way == Way::elements) {
        multiply_elements(args, shape, {weight.data, weight.bias, weight.rows, column}, stream);
      } else {
        multiply_unpacked(args, shape, i, column, workspace, stream);
      }
      column += weight.rows, ++i;
      continue;
    }
    // Neighbours of the same kind go together.
    const RowKind kind = args.formats[i].kind;
    QuantizedCall call{};
    Launch& launch = call.grouped.launch;
    for (launch = shape; i < args.count && launch.count < kMostWeights; ++i) {
      if (args.formats[i].kind != kind || way_of(args, i) != way) break;
      const Weight& own = args.weights[i];
      call.layouts[launch.count] = layout_of(args.formats[i], args.features);
      if (own.rows) launch.products[launch.count++] = {own.data, own.bias, own.rows, column};
      column += own.rows;
    }
    multiply_by_kernels(args, kind, call, stream);
  }
}

}  // namespace quire::cuda

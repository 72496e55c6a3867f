// The functions about quantized weights of the Python module quire.kernels._C: see common/calls.h.
#include "cpu/common/calls.h"
#include "cpu/quantized/quantized_linear.h"

namespace quire {
namespace {

// weights: (data, bias, rows, kind, zeros, row_bytes, group, aux) for each, flat; tables: as `linear` has them.
constexpr size_t kNumbers = 8;

RowFormat format_of(const Numbers& numbers, size_t first) {
  return {static_cast<RowKind>(numbers[first]), numbers[first + 1] != 0, numbers[first + 2], numbers[first + 3],
          at<void>(numbers[first + 4])};
}

void quantized_linear(uintptr_t x, int64_t tokens, int64_t features, int64_t x_stride, const py::tuple& weights,
                      uintptr_t y, int dtype, int out_dtype, const py::tuple& tables, uintptr_t segments,
                      int64_t num_segments) {
  const Numbers numbers(weights), table(tables);
  std::vector<Weight> list(numbers.size() / kNumbers);
  std::vector<RowFormat> formats(list.size());
  std::vector<LoraTable> adapters(table.size() / 2);
  int64_t rows = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const size_t first = kNumbers * i;
    list[i] = {at<void>(numbers[first]), at<void>(numbers[first + 1]), numbers[first + 2]};
    formats[i] = format_of(numbers, first + 3);
    rows += list[i].rows;
  }
  for (size_t i = 0; i < adapters.size(); ++i) adapters[i] = {at<LoraEntry>(table[2 * i]), table[2 * i + 1]};
  const auto call = [=, list = std::move(list), formats = std::move(formats),
                     adapters = std::move(adapters)](const Extent& now) {
    check_segments(at<LoraSegment>(segments), num_segments, now.rows, adapters);
    multiply_quantized(*current, {at<void>(x), at<void>(y), list.data(), static_cast<int64_t>(list.size()), now.rows,
                                  features, x_stride, static_cast<DType>(dtype), static_cast<DType>(out_dtype),
                                  adapters.data(), at<LoraSegment>(segments), num_segments, formats.data()});
  };
  make_linear(tokens, num_segments, call, rows * features * tokens);
}

// table: (data, 0, rows, kind, zeros, row_bytes, group, aux).
void quantized_embedding(uintptr_t ids, int64_t tokens, int64_t channels, const py::tuple& table, uintptr_t added,
                         uintptr_t y, int dtype, float scale) {
  const Numbers numbers(table);
  const RowFormat format = format_of(numbers, 3);
  const EmbeddingArgs args{at<int64_t>(ids), at<void>(numbers[0]), at<void>(added),           at<void>(y), tokens,
                           channels,         numbers[2],           static_cast<DType>(dtype), scale};
  const auto call = [=](const Extent& now) {
    for (int64_t i = 0; i < now.rows; ++i)
      if (args.ids[i] < 0 || args.ids[i] >= args.table_rows)
        throw py::index_error("ids: an id is outside the rows of the table");
    EmbeddingArgs own = about(now, args);
    own.format = &format;
    current->kernels->quantized_embedding(own);
  };
  make({tokens}, call, 4 * tokens * channels);
}

}  // namespace

void bind_quantized(py::module_& module) {
  module.def("quantized_linear", &quantized_linear);
  module.def("quantized_embedding", &quantized_embedding);
}

}  // namespace quire

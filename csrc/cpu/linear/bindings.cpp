// The functions of quire.kernels._C about linear layers.
#include "cpu/common/calls.h"

namespace quire {
namespace {

// weights: (data, bias, rows) for each weight, flat; bias 0: none; rows below 0: as many, packed. tables: (entries,
// slots) for each, flat, or empty; entries 0: no adapter changes its product.
void linear(uintptr_t x, int64_t tokens, int64_t features, int64_t x_stride, const py::tuple& weights, uintptr_t y,
            int dtype, int out_dtype, const py::tuple& tables, uintptr_t segments, int64_t num_segments) {
  const Numbers weight(weights), table(tables);
  std::vector<Weight> list(weight.size() / 3);
  std::vector<LoraTable> adapters(table.size() / 2);
  std::vector<char> packed;  // none, if no weight is
  int64_t rows = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const int64_t own = weight[3 * i + 2];
    list[i] = {at<void>(weight[3 * i]), at<void>(weight[3 * i + 1]), own < 0 ? -own : own};
    rows += list[i].rows;
    if (own < 0) packed.resize(list.size()), packed[i] = true;
  }
  for (size_t i = 0; i < adapters.size(); ++i) adapters[i] = {at<LoraEntry>(table[2 * i]), table[2 * i + 1]};
  const auto call = [=, list = std::move(list), adapters = std::move(adapters),
                     packed = std::move(packed)](const Extent& now) {
    check_segments(at<LoraSegment>(segments), num_segments, now.rows, adapters);
    if (!packed.empty() && !current->kernels->packs_rows(static_cast<DType>(dtype)))
      throw py::value_error("weights: packed ones are not multiplied by with this instruction set");
    LinearArgs args{at<void>(x),
                    at<void>(y),
                    list.data(),
                    static_cast<int64_t>(list.size()),
                    now.rows,
                    features,
                    x_stride,
                    static_cast<DType>(dtype),
                    static_cast<DType>(out_dtype),
                    adapters.data(),
                    at<LoraSegment>(segments),
                    num_segments};
    args.packed = packed.empty() ? nullptr : packed.data();
    current->kernels->linear(args);
  };
  make_linear(tokens, num_segments, call, rows * features * tokens);
}

bool packs_rows(int dtype) { return current->kernels->packs_rows(static_cast<DType>(dtype)); }

void pack_rows(uintptr_t w, int64_t rows, int64_t features) {
  py::gil_scoped_release release;
  current->kernels->pack_rows({at<void>(w), rows, features});
}

}  // namespace

void bind_linear(py::module_& module) {
  module.def("linear", &linear);
  module.def("packs_rows", &packs_rows);
  module.def("pack_rows", &pack_rows);
}

}  // namespace quire

// The functions about experts of the Python module quire.kernels._C: see common/calls.h.
#include "cpu/common/calls.h"
#include "cpu/quantized/quantized_linear.h"

namespace quire {
namespace {

template <class T>
void check_within(const T* values, int64_t count, int64_t limit, const char* message) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) throw py::index_error(message);
}

void route(uintptr_t logits, int64_t tokens, int64_t count, int64_t logits_stride, int64_t chosen, uintptr_t bias,
           int scores, int64_t groups, int64_t top_groups, int64_t group_best, bool renormalise, float added,
           float least, float scale, float tolerance, uintptr_t experts, uintptr_t weights) {
  const RouteArgs args{at<float>(logits),
                       at<float>(bias),
                       at<int32_t>(experts),
                       at<float>(weights),
                       tokens,
                       count,
                       logits_stride,
                       chosen,
                       groups,
                       top_groups,
                       group_best,
                       static_cast<Scores>(scores),
                       renormalise,
                       added,
                       least,
                       scale,
                       tolerance};
  make({tokens}, [=](const Extent& now) { current->kernels->route(about(now, args)); }, 16 * tokens * count);
}

void sort_by_expert(uintptr_t experts, int64_t tokens, int64_t chosen, uintptr_t starts, int64_t count,
                    uintptr_t tokens_of, uintptr_t places) {
  const SortByExpertArgs args{
      at<int32_t>(experts), at<int32_t>(starts), at<int64_t>(tokens_of), at<int32_t>(places), tokens, chosen, count};
  const auto call = [=](const Extent& now) {
    check_within(args.experts, now.rows * chosen, count, "experts: an expert is none of those that there are");
    SortByExpertArgs own = args;
    own.num_tokens = now.rows;
    current->kernels->sort_by_expert(own);
  };
  make({tokens}, call, 4 * tokens * chosen);
}

// Every row has an expert, and an expert's rows are in the order of their tokens.
void check_sorted(const GroupedLinearArgs& args) {
  if (args.starts[0] != 0 || args.starts[args.experts] != args.rows)
    throw py::value_error("starts: must begin with 0 and end with the number of rows");
  for (int64_t e = 0; e < args.experts; ++e)
    if (args.starts[e + 1] < args.starts[e]) throw py::value_error("starts: must not decrease");
  for (int64_t e = 0; e < args.experts; ++e) {
    for (int64_t i = args.starts[e] + 1; i < args.starts[e + 1]; ++i)
      if (args.tokens[i] < args.tokens[i - 1]) throw py::value_error("tokens: an expert's must not decrease");
  }
}

// tables: (entries, slots) for each weight of each expert, flat, or empty; entries 0: no adapter changes its product.
void make_grouped(const GroupedLinearArgs& args, int64_t columns, const py::tuple& tables, int64_t num_tokens) {
  const Numbers table(tables);
  std::vector<LoraTable> adapters(table.size() / 2);
  for (size_t i = 0; i < adapters.size(); ++i) adapters[i] = {at<LoraEntry>(table[2 * i]), table[2 * i + 1]};
  const auto call = [=, adapters = std::move(adapters)](const Extent& now) {
    GroupedLinearArgs own = args;
    own.tables = adapters.data();
    own.rows = now.rows;
    check_sorted(own);
    check_segments(own.segments, own.num_segments, num_tokens, adapters);
    own.formats ? multiply_quantized_experts(*current, own) : current->kernels->grouped_linear(own);
  };
  make_linear(args.rows, args.num_segments, call, columns * args.features * args.rows);
}

void grouped_linear(uintptr_t x, int64_t rows, int64_t features, int64_t x_stride, uintptr_t starts, uintptr_t tokens,
                    int64_t experts, int64_t count, uintptr_t weights, int64_t columns, uintptr_t y, int dtype,
                    const py::tuple& tables, uintptr_t segments, int64_t num_segments, int64_t num_tokens) {
  make_grouped({at<void>(x), at<void>(y), at<int32_t>(starts), at<int64_t>(tokens), at<Weight>(weights), experts, count,
                rows, features, x_stride, static_cast<DType>(dtype), nullptr, at<LoraSegment>(segments), num_segments},
               columns, tables, num_tokens);
}

// formats: of each weight of each expert.
void quantized_grouped_linear(uintptr_t x, int64_t rows, int64_t features, int64_t x_stride, uintptr_t starts,
                              uintptr_t tokens, int64_t experts, int64_t count, uintptr_t weights, uintptr_t formats,
                              int64_t columns, uintptr_t y, int dtype, const py::tuple& tables, uintptr_t segments,
                              int64_t num_segments, int64_t num_tokens) {
  make_grouped({at<void>(x), at<void>(y), at<int32_t>(starts), at<int64_t>(tokens), at<Weight>(weights), experts, count,
                rows, features, x_stride, static_cast<DType>(dtype), nullptr, at<LoraSegment>(segments), num_segments,
                at<RowFormat>(formats)},
               columns, tables, num_tokens);
}

void combine(uintptr_t x, int64_t rows, int64_t channels, int64_t x_stride, uintptr_t places, int64_t tokens,
             int64_t chosen, uintptr_t weights, uintptr_t shared, int64_t shared_stride, uintptr_t shared_gate,
             uintptr_t y, int dtype) {
  const CombineArgs args{at<void>(x),
                         at<int32_t>(places),
                         at<float>(weights),
                         at<void>(shared),
                         at<float>(shared_gate),
                         at<void>(y),
                         tokens,
                         chosen,
                         channels,
                         x_stride,
                         shared_stride,
                         static_cast<DType>(dtype)};
  const int64_t work = tokens * channels * (chosen + 1);
  const auto call = [=](const Extent& now) {
    const int64_t own = now.rows == tokens ? rows : now.rows * chosen;
    check_within(args.places, now.rows * chosen, own, "places: a place is none of the rows of x");
    current->kernels->combine(about(now, args));
  };
  if (rows != tokens * chosen) return make([=] { call(Extent{tokens}); }, work);
  make({tokens}, call, work);
}

}  // namespace

void bind_experts(py::module_& module) {
  module.def("route", &route);
  module.def("sort_by_expert", &sort_by_expert);
  module.def("grouped_linear", &grouped_linear);
  module.def("quantized_grouped_linear", &quantized_grouped_linear);
  module.def("combine", &combine);
}

}  // namespace quire

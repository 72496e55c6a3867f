// The functions about states of the Python module quire.kernels._C: see common/calls.h.
#include "cpu/common/calls.h"

namespace quire {
namespace {

// Where nothing is behind as many tokens as a sequence has in front of the step's, or there is no room for what is left
// behind its last one, nothing can be computed.
void check_past(const PastArgs& past, int64_t tokens) {
  const auto block = [&](int64_t s, int64_t position) -> int64_t {
    const int64_t place = position / past.block_size;
    if (place >= past.places) throw py::index_error("block_table: a sequence has more tokens than it has places for");
    return past.block_table[s * past.table_stride + place];
  };
  int64_t row = 0;
  for (int64_t s = 0; s < past.sequences; ++s) {
    const int64_t first = past.query_start[s], end = past.query_start[s + 1], last = past.context_len[s];
    if (first != row || end < first || end > tokens || last < end - first)
      throw py::index_error("query_start: must ascend from 0 to the number of tokens, none longer than context_len");
    row = end;
    if (first == end) continue;
    const int64_t position = last - (end - first);
    for (int64_t at = position; at < last; at += past.block_size)
      if (block(s, at) >= past.num_blocks)
        throw py::index_error("block_table: a block is none of those that there are");
    const int64_t written = block(s, last - 1);
    if (written < 0 || written >= past.num_blocks)
      throw py::index_error("block_table: there is no block for the state behind a sequence's last token");
    if (position == 0) continue;
    const int64_t read = block(s, position - 1);
    if (read < 0 || read >= past.num_blocks || (past.ends[2 * read] != position && past.ends[2 * read + 1] != position))
      throw py::value_error("block_table: no state is there that stands in front of a sequence's first token");
  }
  if (row != tokens) throw py::index_error("query_start: must ascend from 0 to the number of tokens");
}

void causal_conv1d(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t weight, int64_t kernel,
                   uintptr_t bias, uintptr_t scales, uintptr_t tails, int64_t blocks, uintptr_t ends, uintptr_t table,
                   int64_t sequences, int64_t places, int64_t table_stride, uintptr_t query_start,
                   uintptr_t context_len, int64_t block_size, uintptr_t y, int dtype) {
  const PastArgs past{at<int32_t>(table),
                      at<int32_t>(query_start),
                      at<int32_t>(context_len),
                      at<int64_t>(ends),
                      sequences,
                      places,
                      table_stride,
                      block_size,
                      blocks};
  const CausalConvArgs args{at<void>(x), at<void>(weight), at<void>(bias), at<float>(scales), at<void>(tails),
                            at<void>(y), channels,         kernel,         x_stride,          static_cast<DType>(dtype),
                            past};
  const auto call = [=] {
    check_past(args.past, tokens);
    current->kernels->causal_conv(args);
  };
  make(call, tokens * channels * kernel);
}

void selective_scan(uintptr_t x, int64_t tokens, int64_t x_stride, uintptr_t dt, int64_t heads, int64_t dt_stride,
                    uintptr_t a_log, uintptr_t dt_bias, uintptr_t d, uintptr_t states, int64_t blocks,
                    int64_t state_size, int64_t head_dim, uintptr_t ends, uintptr_t table, int64_t sequences,
                    int64_t places, int64_t table_stride, uintptr_t query_start, uintptr_t context_len,
                    int64_t block_size, int64_t groups, float dt_scale, float dt_min, float dt_max, uintptr_t y,
                    int dtype) {
  const PastArgs past{at<int32_t>(table),
                      at<int32_t>(query_start),
                      at<int32_t>(context_len),
                      at<int64_t>(ends),
                      sequences,
                      places,
                      table_stride,
                      block_size,
                      blocks};
  const SelectiveScanArgs args{at<void>(x),
                               at<void>(dt),
                               at<void>(a_log),
                               at<void>(dt_bias),
                               at<void>(d),
                               at<float>(states),
                               at<void>(y),
                               x_stride,
                               dt_stride,
                               heads,
                               head_dim,
                               state_size,
                               groups,
                               dt_scale,
                               dt_min,
                               dt_max,
                               static_cast<DType>(dtype),
                               past};
  const auto call = [=] {
    check_past(args.past, tokens);
    current->kernels->selective_scan(args);
  };
  make(call, tokens * heads * head_dim * state_size);
}

void gated_norm(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t gate, int64_t gate_stride,
                uintptr_t weight, int64_t groups, float eps, float gate_scale, bool norm_first, uintptr_t y,
                int dtype) {
  const GatedNormArgs args{at<void>(x),
                           at<void>(gate),
                           at<void>(weight),
                           at<void>(y),
                           tokens,
                           channels,
                           x_stride,
                           gate_stride,
                           groups,
                           eps,
                           gate_scale,
                           norm_first,
                           static_cast<DType>(dtype)};
  make([=] { current->kernels->gated_norm(args); }, 4 * tokens * channels);
}

}  // namespace

void bind_states(py::module_& module) {
  module.def("causal_conv1d", &causal_conv1d);
  module.def("selective_scan", &selective_scan);
  module.def("gated_norm", &gated_norm);
}

}  // namespace quire

// The Python module quire.kernels._C: see common/calls.h.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cpu/common/calls.h"
#include "cpu/common/exchange.h"
#include "cpu/common/simulated_team.h"
#include "cpu/common/threads.h"

namespace quire {

const Isa* current = nullptr;

namespace {

std::vector<std::string> available_isas() {
  int count = 0;
  const Isa* table = isas(&count);
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i)
    if (table[i].supported) names.emplace_back(table[i].name);
  return names;
}

// Not while a kernel runs.
void set_isa(const std::string& name) {
  int count = 0;
  const Isa* table = isas(&count);
  std::string known;
  for (int i = 0; i < count; ++i) {
    if (name == table[i].name) {
      if (!table[i].supported) throw std::invalid_argument("this machine does not have the instruction set " + name);
      current = &table[i];
      return;
    }
    known += std::string(known.empty() ? "" : ", ") + table[i].name;
  }
  throw std::invalid_argument("unknown instruction set '" + name + "'; this build has " + known);
}

void check_blocks(const AttentionArgs& args, int64_t tokens, int64_t num_blocks, int64_t table_width) {
  if (args.query_start[0] != 0 || args.query_start[args.sequences] != tokens)
    throw py::value_error("query_start: must begin with 0 and end with the number of tokens");
  for (int64_t s = 0; s < args.sequences; ++s) {
    const int64_t length = args.context_len[s], blocks = (length + args.block_size - 1) / args.block_size;
    const int64_t own = args.query_start[s + 1] - args.query_start[s];
    if (own < 0) throw py::value_error("query_start: must not decrease");
    if (length < own || blocks > table_width)
      throw py::value_error("context_len: must cover the sequence's own tokens and fit its row of block_table");
    // Blocks wholly before what its first token sees are not read.
    for (int64_t b = first_visible(args, length - own) / args.block_size; b < blocks; ++b) {
      const int32_t block = args.block_table[s * args.table_stride + b];
      if (block < 0 || block >= num_blocks) throw py::index_error("block_table: block is not in the pool");
    }
  }
}

// After check_blocks.
void check_visible_end(const AttentionArgs& args) {
  for (int64_t s = 0; s < args.sequences && args.visible_end; ++s) {
    const int64_t length = args.context_len[s], begin = args.query_start[s], end = args.query_start[s + 1];
    for (int64_t t = begin, before = 0; t < end; ++t) {
      const int64_t visible = args.visible_end[t], own = length - (end - t) + 1;
      if (visible < own || visible < before || visible > length)
        throw py::value_error(
            "visible_end: must be at least a token's position + 1, at most its context's length, and not decrease");
      before = visible;
    }
  }
}

// How far behind the beginning of each of `count` rows of `dim` bytes, which lie `stride` bytes apart, is its scale;
// 0 where there is none.
int64_t scale_at(uintptr_t rows, uintptr_t scales, int64_t dim, int64_t stride, int64_t count) {
  if (!scales) return 0;
  const int64_t at = static_cast<int64_t>(scales - rows);
  if (at < dim || (count > 1 && at + static_cast<int64_t>(sizeof(float)) > stride))
    throw py::value_error("scales: expected each in its row, behind the numbers");
  return at;
}

void paged_attention(uintptr_t query, int64_t query_stride, int64_t tokens, int64_t heads, int64_t head_dim,
                     uintptr_t keys, uintptr_t values, int64_t num_blocks, int64_t kv_heads, int64_t block_size,
                     uintptr_t block_table, int64_t table_stride, int64_t table_width, uintptr_t query_start,
                     uintptr_t context_len, int64_t sequences, float scale, uintptr_t out, int dtype, int64_t window,
                     uintptr_t slopes, int64_t value_dim, int64_t value_stride, float softcap, uintptr_t sinks,
                     uintptr_t head_scales, uintptr_t visible_end, int64_t chunk, uintptr_t key_scales,
                     uintptr_t value_scales, int64_t key_stride, uintptr_t biases, int64_t bias_reach) {
  const int64_t rows = num_blocks * kv_heads * block_size;
  const AttentionArgs args{at<void>(query),
                           at<void>(keys),
                           at<void>(values),
                           at<void>(out),
                           at<int32_t>(block_table),
                           at<int32_t>(query_start),
                           at<int32_t>(context_len),
                           query_stride,
                           table_stride,
                           sequences,
                           heads,
                           kv_heads,
                           head_dim,
                           block_size,
                           scale,
                           static_cast<DType>(dtype),
                           window,
                           at<float>(slopes),
                           value_dim,
                           value_stride,
                           softcap,
                           at<float>(sinks),
                           at<float>(head_scales),
                           at<int32_t>(visible_end),
                           chunk,
                           key_stride,
                           scale_at(keys, key_scales, head_dim, key_stride, rows),
                           scale_at(values, value_scales, value_dim, value_stride, rows),
                           at<float>(biases),
                           bias_reach};
  const auto call = [=](const Extent& now) {
    AttentionArgs own = args;
    own.sequences = now.sequences;
    check_blocks(own, now.rows, num_blocks, table_width);
    check_visible_end(own);
    current->kernels->paged_attention(own);
  };
  make({tokens, sequences}, call, 1 << 16);
}

void check_below(const int64_t* values, int64_t count, int64_t limit, const char* message) {
  for (int64_t i = 0; i < count; ++i)
    if (values[i] < 0 || values[i] >= limit) throw py::index_error(message);
}

// table_rows below 0: as many, packed.
void embedding(uintptr_t ids, uintptr_t table, int64_t table_rows, uintptr_t added, uintptr_t y, int64_t tokens,
               int64_t channels, int dtype, float scale) {
  EmbeddingArgs args{at<int64_t>(ids), at<void>(table), at<void>(added),           at<void>(y), tokens,
                     channels,         table_rows,      static_cast<DType>(dtype), scale};
  if (table_rows < 0) args.packed = true, args.table_rows = -table_rows;
  const auto call = [=](const Extent& now) {
    check_below(args.ids, now.rows, args.table_rows, "ids: an id is outside the rows of the table");
    if (args.packed && !current->kernels->packs_rows(args.dtype))
      throw py::value_error("table: a packed one is not looked up with this instruction set");
    current->kernels->embedding(about(now, args));
  };
  make({tokens}, call, tokens * channels * (args.packed ? kPackedLookUp : 1));
}

template <bool kCentred>
void norm(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t weight, uintptr_t bias,
          uintptr_t residual, float eps, uintptr_t y, int dtype, float weight_offset, float x_scale, int64_t heads,
          int64_t weight_stride) {
  const NormArgs args{at<void>(x),
                      at<void>(residual),
                      at<void>(weight),
                      at<void>(bias),
                      at<void>(y),
                      tokens,
                      channels,
                      x_stride,
                      eps,
                      static_cast<DType>(dtype),
                      weight_offset,
                      x_scale,
                      heads,
                      weight_stride};
  const auto call = [=](const Extent& now) {
    (kCentred ? current->kernels->layer_norm : current->kernels->rms_norm)(about(now, args));
  };
  make({tokens}, call, tokens * heads * channels);
}

void rotary(uintptr_t query, int64_t query_stride, uintptr_t key, int64_t key_stride, uintptr_t positions,
            uintptr_t cos_sin, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim,
            int64_t limit, int dtype, bool interleaved, int64_t first) {
  const RotaryArgs args{at<void>(query),
                        at<void>(key),
                        at<int64_t>(positions),
                        at<float>(cos_sin),
                        query_stride,
                        key_stride,
                        tokens,
                        heads,
                        kv_heads,
                        head_dim,
                        rotary_dim,
                        limit,
                        static_cast<DType>(dtype),
                        interleaved,
                        first};
  const auto call = [=](const Extent& now) {
    check_below(args.positions, now.rows, limit, "positions: a position is outside the rows of cos_sin");
    current->kernels->rotary(about(now, args));
  };
  make({tokens}, call, tokens * (heads + kv_heads) * head_dim);
}

void activation(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, int kind, bool gated, uintptr_t y,
                int dtype) {
  const ActivationArgs args{at<void>(x), at<void>(y),
                            tokens,      channels,
                            x_stride,    static_cast<Activation>(kind),
                            gated,       static_cast<DType>(dtype)};
  make({tokens}, [=](const Extent& now) { current->kernels->activation(about(now, args)); }, 4 * tokens * channels);
}

void likeliest(uintptr_t logits, int64_t rows, int64_t columns, uintptr_t tokens) {
  const LikeliestArgs args{at<float>(logits), at<int64_t>(tokens), rows, columns};
  make([=] { current->kernels->likeliest(args); }, rows * columns);
}

void sum_rows(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t query_start, int64_t sequences,
              uintptr_t sums, int dtype) {
  const SumRowsArgs args{at<void>(x), at<int32_t>(query_start), at<double>(sums), tokens, channels, x_stride,
                         sequences,   static_cast<DType>(dtype)};
  const auto call = [=] {
    if (args.query_start[0] != 0 || args.query_start[sequences] != tokens)
      throw py::value_error("query_start: must begin with 0 and end with the number of rows");
    for (int64_t s = 0; s < sequences; ++s)
      if (args.query_start[s + 1] < args.query_start[s]) throw py::value_error("query_start: must not decrease");
    current->kernels->sum_rows(args);
  };
  make(call, tokens * channels);
}

void clamped_swiglu(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, float alpha, float limit,
                    bool interleaved, uintptr_t y, int dtype) {
  const ClampedSwigluArgs args{
      at<void>(x), at<void>(y), tokens, channels, x_stride, alpha, limit, interleaved, static_cast<DType>(dtype)};
  make({tokens}, [=](const Extent& now) { current->kernels->clamped_swiglu(about(now, args)); }, 4 * tokens * channels);
}

void xielu(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t alpha_p, uintptr_t alpha_n,
           uintptr_t beta, uintptr_t eps, uintptr_t y, int dtype) {
  const XieluArgs args{
      at<void>(x), at<void>(alpha_p), at<void>(alpha_n), at<float>(beta),          at<float>(eps), at<void>(y),
      tokens,      channels,          x_stride,          static_cast<DType>(dtype)};
  make({tokens}, [=](const Extent& now) { current->kernels->xielu(about(now, args)); }, 4 * tokens * channels);
}

void add(uintptr_t x, int64_t x_stride, uintptr_t added, int64_t added_stride, float scale, uintptr_t y, int64_t tokens,
         int64_t channels, int dtype) {
  const AddArgs args{at<void>(x), at<void>(added),          at<void>(y), tokens, channels, x_stride, added_stride,
                     scale,       static_cast<DType>(dtype)};
  make({tokens}, [=](const Extent& now) { current->kernels->add(about(now, args)); }, tokens * channels);
}

void scale(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, float factor, float cap, uintptr_t y,
           int dtype, float limit, uintptr_t rows) {
  const ScaleArgs args{at<void>(x), at<void>(y),    tokens, channels, x_stride, factor, cap, static_cast<DType>(dtype),
                       limit,       at<float>(rows)};
  make(
      {tokens}, [=](const Extent& now) { current->kernels->scale(about(now, args)); },
      (cap ? 4 : 1) * tokens * channels);
}

void join_heads(uintptr_t first, int64_t first_stride, int64_t first_step, int64_t first_size, uintptr_t second,
                int64_t second_stride, int64_t second_step, int64_t second_size, uintptr_t y, int64_t tokens,
                int64_t heads, int dtype) {
  const JoinHeadsArgs args{at<void>(first), at<void>(second), at<void>(y),   first_stride,
                           first_step,      first_size,       second_stride, second_step,
                           second_size,     tokens,           heads,         static_cast<DType>(dtype)};
  make(
      {tokens}, [=](const Extent& now) { current->kernels->join_heads(about(now, args)); },
      tokens * heads * (first_size + second_size));
}

void write_kv(uintptr_t key, int64_t key_stride, uintptr_t value, int64_t value_stride, uintptr_t keys,
              uintptr_t values, uintptr_t slots, int64_t tokens, int64_t kv_heads, int64_t head_dim, int64_t block_size,
              int64_t num_blocks, int64_t element_bytes, int64_t value_dim, uintptr_t key_scales,
              uintptr_t value_scales, int64_t key_bytes, int64_t value_bytes, int dtype) {
  const int64_t rows = num_blocks * kv_heads * block_size;
  const WriteKvArgs args{at<void>(key),
                         at<void>(value),
                         at<void>(keys),
                         at<void>(values),
                         at<int64_t>(slots),
                         key_stride,
                         value_stride,
                         tokens,
                         kv_heads,
                         head_dim,
                         block_size,
                         num_blocks,
                         element_bytes,
                         value_dim,
                         scale_at(keys, key_scales, head_dim, key_bytes, rows),
                         scale_at(values, value_scales, value_dim, value_bytes, rows),
                         key_bytes,
                         value_bytes,
                         static_cast<DType>(dtype)};
  const auto call = [=](const Extent& now) {
    check_below(args.slots, now.rows, num_blocks * block_size, "slot_mapping: a slot is outside the pool");
    current->kernels->write_kv(about(now, args));
  };
  make({tokens}, call, tokens * kv_heads * (head_dim + value_dim) / 2);
}

// The interpreter is let go however little there is to do: this waits for other processes.
void gather(uintptr_t memory, int64_t place_bytes, int64_t rank, int64_t size, uintptr_t own, uintptr_t all,
            int64_t rows, int64_t columns, int64_t element, uintptr_t bounds, int64_t parts) {
  const ExchangeArgs args{at<char>(memory), place_bytes,         rank, size,
                          at<void>(own),    at<void>(all),       rows, columns,
                          element,          at<int64_t>(bounds), parts};
  make([=] { gather_columns(args); }, INT64_MAX);
}

}  // namespace
}  // namespace quire

PYBIND11_MODULE(_C, module) {
  using namespace quire;
  current = [] {
    int count = 0;
    const Isa* table = isas(&count);
    while (!table->supported) ++table;
    return table;
  }();
  module.def("available_isas", [] {
    py::list names;
    for (const std::string& name : available_isas()) names.append(name);
    return names;
  });
  module.def("isa", [] { return current->name; });
  module.def("set_isa", &set_isa);
  module.def("use_openmp", &use_openmp);
  module.def("use_thread_count", &use_thread_count);
  module.def("set_thread_count", &set_thread_count);
  module.def("uses_openmp", &uses_openmp);
  module.def("max_threads", &max_threads);
  module.def("simulate_team", &simulate_team);
  module.def("simulated_time", [] {
    const SimulatedTime time = simulated_time();
    return py::make_tuple(time.regions, time.work, time.last);
  });

  module.def("paged_attention", &paged_attention);
  module.def("embedding", &embedding);
  module.def("rms_norm", &norm<false>);
  module.def("layer_norm", &norm<true>);
  module.def("rotary", &rotary);
  module.def("activation", &activation);
  module.def("write_kv", &write_kv);
  module.def("clamped_swiglu", &clamped_swiglu);
  module.def("xielu", &xielu);
  module.def("add", &add);
  module.def("scale", &scale);
  module.def("join_heads", &join_heads);
  module.def("likeliest", &likeliest);
  module.def("sum_rows", &sum_rows);
  module.def("gather_columns", &gather);
  bind_experts(module);
  bind_linear(module);
  bind_quantized(module);
  bind_states(module);

  py::class_<Recording>(module, "Recording")
      .def(py::init<>())
      .def("begin", [](Recording& own) { own.begin(); })
      .def("begin_sizable", [](Recording& own, int64_t tokens, int64_t sequences,
                               int64_t wanted) { own.begin(StepSize{tokens, sequences, wanted}); })
      .def_static("end", &Recording::end)
      .def("replay", [](Recording& own) { own.replay(); })
      .def("replay_for", [](Recording& own, int64_t tokens, int64_t sequences,
                            int64_t wanted) { own.replay(StepSize{tokens, sequences, wanted}); })
      .def_property_readonly("sizable", &Recording::sizable)
      .def("__len__", &Recording::size);
  py::class_<TeamSize>(module, "TeamSize")  // for tests: each recording has its own
      .def(py::init<>())
      .def("alone", &TeamSize::alone)
      .def("asks_for_core_time", &TeamSize::asks_for_core_time)
      .def("took", &TeamSize::took);
}

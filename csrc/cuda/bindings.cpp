// The Python module quire.kernels._cuda: addresses on the device, shapes and strides, which kernels/cuda.py, its only
// caller, has checked, and the stream to work on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "cuda/common/kernels.h"

namespace py = pybind11;

namespace quire::cuda {
namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Stream stream_at(uintptr_t stream) { return reinterpret_cast<Stream>(stream); }
DType dtype_of(int code) { return static_cast<DType>(code); }

// weights: (data, bias, rows) for each weight, flat; bias 0: none.
void linear_binding(uintptr_t x, int64_t tokens, int64_t features, int64_t x_stride,
                    const std::vector<int64_t>& weights, uintptr_t y, int dtype, int out_dtype, uintptr_t stream) {
  std::vector<Weight> list(weights.size() / 3);
  for (size_t i = 0; i < list.size(); ++i)
    list[i] = {at<void>(weights[3 * i]), at<void>(weights[3 * i + 1]), weights[3 * i + 2]};
  linear({at<void>(x), at<void>(y), list.data(), static_cast<int64_t>(list.size()), tokens, features, x_stride,
          dtype_of(dtype), dtype_of(out_dtype), nullptr, nullptr, 0},
         stream_at(stream));
}

// weights: (data, bias, rows, kind, zeros, row_bytes, group, aux) for each, flat. What they say lives as long as this.
struct Quantized {
  std::vector<Weight> weights;
  std::vector<RowFormat> formats;
  LinearArgs args{};

  Quantized(const std::vector<int64_t>& numbers, int64_t tokens, int64_t features, int dtype) {
    for (size_t i = 0; i + 7 < numbers.size(); i += 8) {
      const int64_t* own = &numbers[i];
      weights.push_back({at<void>(own[0]), at<void>(own[1]), own[2]});
      formats.push_back({static_cast<RowKind>(own[3]), own[4] != 0, own[5], own[6], at<void>(own[7])});
    }
    args.weights = weights.data(), args.count = static_cast<int64_t>(weights.size()), args.formats = formats.data();
    args.tokens = tokens, args.features = features, args.dtype = dtype_of(dtype);
  }
};

int64_t quantized_workspace_binding(int64_t tokens, int64_t features, const std::vector<int64_t>& weights, int dtype) {
  return quantized_workspace(Quantized(weights, tokens, features, dtype).args);
}

void quantized_linear_binding(uintptr_t x, int64_t tokens, int64_t features, int64_t x_stride,
                              const std::vector<int64_t>& weights, uintptr_t y, int dtype, int out_dtype,
                              uintptr_t workspace, uintptr_t stream) {
  Quantized call(weights, tokens, features, dtype);
  call.args.x = at<void>(x), call.args.y = at<void>(y);
  call.args.x_stride = x_stride, call.args.out_dtype = dtype_of(out_dtype);
  quantized_linear(call.args, at<void>(workspace), stream_at(stream));
}

void quantized_embedding_binding(uintptr_t ids, int64_t tokens, int64_t channels, const std::vector<int64_t>& table,
                                 uintptr_t added, uintptr_t y, int dtype, float scale, uintptr_t stream) {
  const Quantized call(table, tokens, channels, dtype);
  quantized_embedding({at<int64_t>(ids), call.weights[0].data, at<void>(added), at<void>(y), tokens, channels,
                       call.weights[0].rows, dtype_of(dtype), scale, call.formats.data()},
                      stream_at(stream));
}

// targets: (entries, slots, first column, columns) for each weight that adapters may change, flat.
void lora_binding(uintptr_t x, int64_t tokens, int64_t features, int64_t x_stride, const std::vector<int64_t>& targets,
                  uintptr_t y, int64_t columns, uintptr_t segments, int64_t num_segments, uintptr_t hidden,
                  int64_t layers, int64_t max_rank, int dtype, int out_dtype, uintptr_t stream) {
  LoraArgs args{};
  args.x = at<void>(x), args.y = at<void>(y);
  args.num_targets = static_cast<int64_t>(targets.size() / 4);
  if (args.num_targets > kMostTargets) throw py::value_error("tables: too many weights in one call");
  for (int64_t i = 0; i < args.num_targets; ++i) {
    const int64_t* target = &targets[static_cast<size_t>(4 * i)];
    args.targets[i] = {at<LoraEntry>(target[0]), target[1], target[2], target[3]};
  }
  args.tokens = tokens, args.features = features, args.columns = columns, args.x_stride = x_stride;
  args.segments = at<LoraSegment>(segments), args.num_segments = num_segments;
  args.hidden = at<float>(hidden), args.layers = layers, args.max_rank = max_rank;
  args.dtype = dtype_of(dtype), args.out_dtype = dtype_of(out_dtype);
  lora(args, stream_at(stream));
}

void route_binding(uintptr_t logits, int64_t tokens, int64_t count, int64_t logits_stride, int64_t chosen,
                   uintptr_t bias, int scores, int64_t groups, int64_t top_groups, int64_t group_best, bool renormalise,
                   float added, float least, float scale, float tolerance, uintptr_t experts, uintptr_t weights,
                   uintptr_t stream) {
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
  route(args, stream_at(stream));
}

void sort_by_expert_binding(uintptr_t experts, int64_t tokens, int64_t chosen, uintptr_t starts, int64_t count,
                            uintptr_t tokens_of, uintptr_t places, uintptr_t stream) {
  sort_by_expert(
      {at<int32_t>(experts), at<int32_t>(starts), at<int64_t>(tokens_of), at<int32_t>(places), tokens, chosen, count},
      stream_at(stream));
}

// weights: of all experts, on the device; weight_rows: of each weight of an expert.
void grouped_linear_binding(uintptr_t x, int64_t rows, int64_t features, int64_t x_stride, uintptr_t starts,
                            uintptr_t tokens, int64_t experts, int64_t count, uintptr_t weights, int64_t, uintptr_t y,
                            int dtype, const std::vector<int64_t>& weight_rows, bool aligned, uintptr_t stream) {
  const GroupedLinearArgs args{at<void>(x),
                               at<void>(y),
                               at<int32_t>(starts),
                               at<int64_t>(tokens),
                               at<Weight>(weights),
                               experts,
                               count,
                               rows,
                               features,
                               x_stride,
                               dtype_of(dtype),
                               nullptr,
                               nullptr,
                               0};
  grouped_linear(args, {weight_rows.data(), aligned}, stream_at(stream));
}

void expert_segments_binding(uintptr_t starts, uintptr_t tokens, int64_t experts, int64_t rows, uintptr_t segments,
                             int64_t num_segments, int64_t num_tokens, int64_t layers, uintptr_t tables, int64_t count,
                             uintptr_t own, uintptr_t entries, int64_t capacity, uintptr_t owners, uintptr_t stream) {
  expert_segments({at<int32_t>(starts), at<int64_t>(tokens), experts, rows, at<LoraSegment>(segments), num_segments,
                   num_tokens, layers, at<LoraTable>(tables), count, at<LoraSegment>(own), at<LoraEntry>(entries),
                   capacity, at<int32_t>(owners)},
                  stream_at(stream));
}

void combine_binding(uintptr_t x, int64_t rows, int64_t channels, int64_t x_stride, uintptr_t places, int64_t tokens,
                     int64_t chosen, uintptr_t weights, uintptr_t shared, int64_t shared_stride, uintptr_t shared_gate,
                     uintptr_t y, int dtype, uintptr_t stream) {
  combine({at<void>(x), at<int32_t>(places), at<float>(weights), at<void>(shared), at<float>(shared_gate), at<void>(y),
           tokens, chosen, channels, x_stride, shared_stride, dtype_of(dtype)},
          rows, stream_at(stream));
}

int64_t attention_workspace_binding(int64_t tokens, int64_t heads, int64_t head_dim, int64_t value_dim,
                                    int64_t kv_heads, int64_t block_size, int64_t table_width, int64_t sequences,
                                    int dtype) {
  AttentionArgs args{};
  args.sequences = sequences, args.heads = heads, args.kv_heads = kv_heads;
  args.head_dim = head_dim, args.value_dim = value_dim, args.block_size = block_size, args.dtype = dtype_of(dtype);
  return attention_workspace(args, {tokens, table_width, 0});
}

void attention_binding(uintptr_t query, int64_t query_stride, int64_t tokens, int64_t heads, int64_t head_dim,
                       uintptr_t keys, uintptr_t values, int64_t num_blocks, int64_t kv_heads, int64_t block_size,
                       uintptr_t block_table, int64_t table_stride, int64_t table_width, uintptr_t query_start,
                       uintptr_t context_len, int64_t sequences, float scale, uintptr_t out, int dtype, int64_t window,
                       uintptr_t slopes, int64_t value_dim, int64_t value_stride, float softcap, uintptr_t sinks,
                       uintptr_t head_scales, uintptr_t visible_end, int64_t chunk, uintptr_t workspace,
                       uintptr_t stream) {
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
                           dtype_of(dtype),
                           window,
                           at<float>(slopes),
                           value_dim,
                           value_stride,
                           softcap,
                           at<float>(sinks),
                           at<float>(head_scales),
                           at<int32_t>(visible_end),
                           chunk};
  paged_attention(args, {tokens, table_width, num_blocks}, at<void>(workspace), stream_at(stream));
}

void embedding_binding(uintptr_t ids, uintptr_t table, int64_t table_rows, uintptr_t added, uintptr_t y, int64_t tokens,
                       int64_t channels, int dtype, float scale, uintptr_t stream) {
  embedding({at<int64_t>(ids), at<void>(table), at<void>(added), at<void>(y), tokens, channels, table_rows,
             dtype_of(dtype), scale},
            stream_at(stream));
}

template <bool kCentred>
void norm_binding(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                  uintptr_t residual, float eps, uintptr_t y, int dtype, float weight_offset, float x_scale,
                  int64_t heads, int64_t weight_stride, uintptr_t stream) {
  const NormArgs args{
      at<void>(x), at<void>(residual), at<void>(weight), at<void>(bias), at<void>(y), tokens,       channels, x_stride,
      eps,         dtype_of(dtype),    weight_offset,    x_scale,        heads,       weight_stride};
  (kCentred ? layer_norm : rms_norm)(args, stream_at(stream));
}

void rotary_binding(uintptr_t query, int64_t query_stride, uintptr_t key, int64_t key_stride, uintptr_t positions,
                    uintptr_t cos_sin, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim,
                    int64_t rotary_dim, int64_t rows, int dtype, bool interleaved, int64_t first, uintptr_t stream) {
  rotary({at<void>(query), at<void>(key), at<int64_t>(positions), at<float>(cos_sin), query_stride, key_stride, tokens,
          heads, kv_heads, head_dim, rotary_dim, rows, dtype_of(dtype), interleaved, first},
         stream_at(stream));
}

void activation_binding(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, int kind, bool gated,
                        uintptr_t y, int dtype, uintptr_t stream) {
  activation(
      {at<void>(x), at<void>(y), tokens, channels, x_stride, static_cast<Activation>(kind), gated, dtype_of(dtype)},
      stream_at(stream));
}

void clamped_swiglu_binding(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, float alpha, float limit,
                            bool interleaved, uintptr_t y, int dtype, uintptr_t stream) {
  clamped_swiglu({at<void>(x), at<void>(y), tokens, channels, x_stride, alpha, limit, interleaved, dtype_of(dtype)},
                 stream_at(stream));
}

void xielu_binding(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, uintptr_t alpha_p,
                   uintptr_t alpha_n, uintptr_t beta, uintptr_t eps, uintptr_t y, int dtype, uintptr_t stream) {
  xielu({at<void>(x), at<void>(alpha_p), at<void>(alpha_n), at<float>(beta), at<float>(eps), at<void>(y), tokens,
         channels, x_stride, dtype_of(dtype)},
        stream_at(stream));
}

void add_binding(uintptr_t x, int64_t x_stride, uintptr_t added, int64_t added_stride, float scale, uintptr_t y,
                 int64_t tokens, int64_t channels, int dtype, uintptr_t stream) {
  add({at<void>(x), at<void>(added), at<void>(y), tokens, channels, x_stride, added_stride, scale, dtype_of(dtype)},
      stream_at(stream));
}

void scale_binding(uintptr_t x, int64_t tokens, int64_t channels, int64_t x_stride, float factor, float cap,
                   uintptr_t y, int dtype, float limit, uintptr_t rows, uintptr_t stream) {
  scale({at<void>(x), at<void>(y), tokens, channels, x_stride, factor, cap, dtype_of(dtype), limit, at<float>(rows)},
        stream_at(stream));
}

void join_heads_binding(uintptr_t first, int64_t first_stride, int64_t first_step, int64_t first_size, uintptr_t second,
                        int64_t second_stride, int64_t second_step, int64_t second_size, uintptr_t y, int64_t tokens,
                        int64_t heads, int dtype, uintptr_t stream) {
  join_heads({at<void>(first), at<void>(second), at<void>(y), first_stride, first_step, first_size, second_stride,
              second_step, second_size, tokens, heads, dtype_of(dtype)},
             stream_at(stream));
}

void write_kv_binding(uintptr_t key, int64_t key_stride, uintptr_t value, int64_t value_stride, uintptr_t keys,
                      uintptr_t values, uintptr_t slots, int64_t tokens, int64_t kv_heads, int64_t head_dim,
                      int64_t block_size, int64_t num_blocks, int64_t element_bytes, int64_t value_dim,
                      uintptr_t stream) {
  write_kv({at<void>(key), at<void>(value), at<void>(keys), at<void>(values), at<int64_t>(slots), key_stride,
            value_stride, tokens, kv_heads, head_dim, block_size, num_blocks, element_bytes, value_dim},
           stream_at(stream));
}

BlockArgs block_args(uintptr_t caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes, uintptr_t from,
                     uintptr_t to, int64_t count) {
  return {at<void*>(caches), num_caches, num_blocks, block_bytes, at<int64_t>(from), at<int64_t>(to), count};
}

}  // namespace
}  // namespace quire::cuda

PYBIND11_MODULE(_cuda, module) {
  using namespace quire::cuda;
#ifdef QUIRE_CUDA_EMULATION
  module.attr("device") = "cpu";  // where the tensors lie that the kernels work on
#else
  module.attr("device") = "cuda";
  module.attr("architectures") = QUIRE_CUDA_ARCHITECTURES;  // that the kernels were compiled for
  module.def("driver_version", [] {
    int version = 0;  // of CUDA, 1000 major + 10 minor; 0: there is no driver
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  });
  module.attr("runtime_version") = CUDART_VERSION;
#endif
  module.def("check_device", &check_device);
  module.def("linear", &linear_binding);
  module.def("quantized_workspace", &quantized_workspace_binding);
  module.def("quantized_linear", &quantized_linear_binding);
  module.def("quantized_embedding", &quantized_embedding_binding);
  module.def("lora", &lora_binding);
  module.attr("most_targets") = kMostTargets;
  module.def("route", &route_binding);
  module.def("sort_by_expert", &sort_by_expert_binding);
  module.def("grouped_linear", &grouped_linear_binding);
  module.def("expert_segments", &expert_segments_binding);
  module.def("combine", &combine_binding);
  module.def("attention_workspace", &attention_workspace_binding);
  module.def("paged_attention", &attention_binding);
  module.def("embedding", &embedding_binding);
  module.def("rms_norm", &norm_binding<false>);
  module.def("layer_norm", &norm_binding<true>);
  module.def("rotary", &rotary_binding);
  module.def("activation", &activation_binding);
  module.def("clamped_swiglu", &clamped_swiglu_binding);
  module.def("xielu", &xielu_binding);
  module.def("add", &add_binding);
  module.def("scale", &scale_binding);
  module.def("join_heads", &join_heads_binding);
  module.def("write_kv", &write_kv_binding);
  module.def("copy_blocks", [](uintptr_t caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                               uintptr_t from, uintptr_t to, int64_t count, uintptr_t stream) {
    copy_blocks(block_args(caches, num_caches, num_blocks, block_bytes, from, to, count), stream_at(stream));
  });
  module.def("gather_blocks", [](uintptr_t caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                                 uintptr_t from, int64_t count, uintptr_t packed, uintptr_t stream) {
    gather_blocks(block_args(caches, num_caches, num_blocks, block_bytes, from, 0, count), at<void>(packed),
                  stream_at(stream));
  });
  module.def("scatter_blocks", [](uintptr_t caches, int64_t num_caches, int64_t num_blocks, int64_t block_bytes,
                                  uintptr_t to, int64_t count, uintptr_t packed, uintptr_t stream) {
    scatter_blocks(block_args(caches, num_caches, num_blocks, block_bytes, 0, to, count), at<void>(packed),
                   stream_at(stream));
  });
  module.def("sample", [](uintptr_t logits, int64_t vocabulary, int64_t stride, uintptr_t draws, int64_t count,
                          uintptr_t tokens, uintptr_t stream) {
    sample(at<float>(logits), vocabulary, stride, at<Draw>(draws), count, at<int64_t>(tokens), stream_at(stream));
  });
}

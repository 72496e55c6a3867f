// The kernels of the GPU: each starts its work on a stream and returns. kernels/ops.py says what they compute, and
// arguments.h of what; what is written here is of the GPU alone. Nothing can be raised from a running kernel: an
// index that points nowhere (a slot or an id below 0 above all, which pads a batch) is passed over, or reads as zeros.
#pragma once

#include "cuda/common/device.h"

namespace quire::cuda {

// Shared memory that a kernel may ask for a block.
constexpr int kMostShared = 163 * 1024;

// Throws std::runtime_error where the current device cannot run what was compiled.
void check_device();

// y = x W^T + bias of every weight, side by side. An element's sum is made of the same operations in the same order for
// any number of tokens.
void linear(const LinearArgs& args, Stream stream);

// The same of weights whose rows are bytes, of args.formats: each number becomes one of args.dtype, rounded once. x can be
// read 16 bytes at a time, zeros behind its last column. Data start at multiples of `quantized_alignment`.
// workspace: `quantized_workspace` bytes, or null for none.
int64_t quantized_workspace(const LinearArgs& args);
void quantized_linear(const LinearArgs& args, void* workspace, Stream stream);
void quantized_embedding(const EmbeddingArgs& args, Stream stream);

// What a table of adapters is for `lora`: the columns first .. first + rows of y are its weight's product.
struct LoraTarget {
  const LoraEntry* entries;  // on the device, [slots], or null: none
  int64_t slots, first, rows;
};

constexpr int kMostTargets = 8;

// Adds to y what adapters change in the rows of the segments. Segments that name the same rows follow each other, and
// are added in that order.
struct LoraArgs {
  const void* x;  // [T, K], rows x_stride apart
  void* y;        // [T, columns], contiguous, dtype or float32
  LoraTarget targets[kMostTargets];
  int64_t num_targets, tokens, features, columns, x_stride;
  const LoraSegment* segments;  // on the device
  int64_t num_segments;
  // [num_targets, layers, T, max_rank] of float: x a^T. layers: how often a row may be named.
  float* hidden;
  int64_t layers, max_rank;
  DType dtype, out_dtype;
};
void lora(const LoraArgs& args, Stream stream);

void route(const RouteArgs& args, Stream stream);
void sort_by_expert(const SortByExpertArgs& args, Stream stream);
// What stands in the device's memory, so that the host knows how much to start.
struct GroupedSizes {
  const int64_t* weight_rows;  // [count], of each weight of an expert
  bool aligned;                // whether all weights can be read 16 bytes at a time
};
// The products alone: adapters are `lora`'s, by the segments that `expert_segments` makes.
void grouped_linear(const GroupedLinearArgs& args, const GroupedSizes& sizes, Stream stream);
void combine(const CombineArgs& args, int64_t rows, Stream stream);

// Rows are sorted by expert, as for `grouped_linear`. All is on the device.
struct ExpertSegmentsArgs {
  const int32_t* starts;  // [experts + 1]
  const int64_t* tokens;  // [rows]
  int64_t experts, rows;
  const LoraSegment* segments;  // of the step's tokens
  int64_t num_segments, num_tokens;
  int64_t layers;           // how often a token may be named
  const LoraTable* tables;  // [experts, count]
  int64_t count;
  // Made: segments of rows, whose slot is their own number, and of each weight what is in that slot. capacity: as many
  // as there can be, no more than experts * num_segments, nor rows * layers.
  LoraSegment* own;    // [capacity]
  LoraEntry* entries;  // [count, capacity]
  int64_t capacity;
  int32_t* owners;  // [num_tokens], memory to work with
};
void expert_segments(const ExpertSegmentsArgs& args, Stream stream);

// What the device's memory holds besides, so that the host knows how much to start.
struct AttentionSizes {
  int64_t tokens;       // T
  int64_t table_width;  // B
  int64_t num_blocks;   // of keys and values
};
// workspace: `attention_workspace` bytes, or null for none. Sequences of one token are read by many blocks of threads,
// a span of keys each; others by one for every tile of their tokens. A row's bits are the same either way.
int64_t attention_workspace(const AttentionArgs& args, const AttentionSizes& sizes);
void paged_attention(const AttentionArgs& args, const AttentionSizes& sizes, void* workspace, Stream stream);

void embedding(const EmbeddingArgs& args, Stream stream);
void rms_norm(const NormArgs& args, Stream stream);
void layer_norm(const NormArgs& args, Stream stream);
void rotary(const RotaryArgs& args, Stream stream);
void activation(const ActivationArgs& args, Stream stream);
void clamped_swiglu(const ClampedSwigluArgs& args, Stream stream);
void xielu(const XieluArgs& args, Stream stream);
void add(const AddArgs& args, Stream stream);
void scale(const ScaleArgs& args, Stream stream);
void join_heads(const JoinHeadsArgs& args, Stream stream);
void write_kv(const WriteKvArgs& args, Stream stream);

// The pool's tensors (keys and values of all layers) by address, and blocks of them.
struct BlockArgs {
  void* const* caches;  // on the device, [num_caches]; each [num_blocks, block_bytes]
  int64_t num_caches, num_blocks, block_bytes;
  const int64_t* from;  // on the device, [count]
  const int64_t* to;    // likewise
  int64_t count;
};
// Block from[i] becomes block to[i] in every cache; no block is in both lists.
void copy_blocks(const BlockArgs& args, Stream stream);
// packed: [count, num_caches, block_bytes]. Blocks from[i] to packed[i]; packed[i] to blocks to[i].
void gather_blocks(const BlockArgs& args, void* packed, Stream stream);
void scatter_blocks(const BlockArgs& args, const void* packed, Stream stream);

// One token to draw. kernels/sampling.py writes it.
struct Draw {
  int64_t row;
  double uniform;     // in [0, 1)
  float temperature;  // 0: the likeliest token
  float top_p, min_p;
  int32_t top_k;  // 0: no limit
};
// logits: [R, V] float, rows `stride` apart. tokens: [count]; -1 where the row is not finite.
void sample(const float* logits, int64_t vocabulary, int64_t stride, const Draw* draws, int64_t count, int64_t* tokens,
            Stream stream);

}  // namespace quire::cuda

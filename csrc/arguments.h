// The arguments of the kernels, the same for every device: plain structs of addresses, shapes and strides (in
// elements). The Python side has checked them. kernels/ops.py says what each kernel computes.
#pragma once

#include <stdint.h>

namespace quire {

enum class DType : int { float32 = 0, bfloat16 = 1, float16 = 2 };
enum class Activation : int {
  silu = 0,
  relu = 1,
  gelu = 2,
  gelu_tanh = 3,
  quick_gelu = 4,
  relu2 = 5,
  relu6 = 6,
  sigmoid = 7,
  tanh = 8,
  mish = 9
};

// What the bytes of a quantized weight's row mean. The first are GGML's own numbers, and its own blocks of bytes.
enum class RowKind : int {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q2_k = 10,
  q3_k = 11,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
  mxfp4 = 39,
  int8_rows = 1000,  // [float scale][K int8]
  affine4 = 1004,    // [G float scales][G float zeros, if any][codes]: (code - zero) * scale; no zeros: 8, or 128
  affine8 = 1008,
  table4 = 1014,  // [G float scales][codes]: table[code] * scale
  table8 = 1018
};

struct RowFormat {
  RowKind kind;
  bool zeros;  // affine rows have zeros
  int64_t row_bytes;
  int64_t group;    // columns of one scale, of the affine and table kinds; 0: the whole row
  const void* aux;  // of table kinds float [16] or [256]; of affine kinds int32 [K], each column's group, or null
};

struct Weight {
  const void*
      data;  // [rows, K], contiguous, at any address that suits the dtype; or rows of bytes, one behind the other
  const void* bias;  // [rows] or null
  int64_t rows;
};

// What one adapter does to one weight's product: y = (y + scaling * (x a^T) b) * scale + shift. A row of the weight's
// table, which kernels/adapters.py writes.
struct LoraEntry {
  const void* a;       // [rank, K], contiguous
  const void* b;       // [ceil(N / kLoraColumns), rank, kLoraColumns], zeros past N; on a GPU [N, rank]
  const float* scale;  // [N] or null
  const float* shift;  // [N] or null
  int64_t rank;
  double scaling;
};
constexpr int64_t kLoraColumns = 32;  // a multiple of every kBlockRows

// Rows start .. end of a call belong to the adapter in row `slot` of the tables. Rows may be named again, for another
// adapter's share on top, right after; where end <= start there is nothing to do.
struct LoraSegment {
  int64_t start, end, slot;
  double weight;
};

struct LoraTable {
  const LoraEntry* entries;  // [slots], or null: no adapter changes this weight's product
  int64_t slots;
};

// A weight whose rows are to be packed, where they lie: see cpu/linear/columns.h.
struct PackArgs {
  void* w;  // [rows, K], contiguous
  int64_t rows, features;
};

struct LinearArgs {
  const void* x;  // [T, K], rows x_stride apart
  void* y;        // [T, sum of rows], contiguous
  const Weight* weights;
  int64_t count, tokens, features, x_stride;
  DType dtype, out_dtype;       // out_dtype is dtype or float32
  const LoraTable* tables;      // one for each weight
  const LoraSegment* segments;  // none: the tables are not looked at
  int64_t num_segments;
  const RowFormat* formats = nullptr;  // one for each weight; null: weights are elements of `dtype`
  int64_t y_stride = 0;                // from a token's row of y to the next one's; 0: y is contiguous
  const char* packed = nullptr;        // of each weight, whether `pack_rows` has packed it; null: none is
};

// Rows sorted by expert, each times its own expert's weights.
struct GroupedLinearArgs {
  const void* x;          // [rows, K], rows x_stride apart
  void* y;                // [rows, sum of an expert's weights' rows], contiguous
  const int32_t* starts;  // [experts + 1]: an expert's first row; the last is `rows`
  const int64_t* tokens;  // [rows]: the step's token of each; an expert's ascend
  const Weight* weights;  // [experts, count]
  int64_t experts, count, rows, features, x_stride;
  DType dtype;
  const LoraTable* tables;      // [experts, count]; not looked at without segments
  const LoraSegment* segments;  // of the step's tokens
  int64_t num_segments;
  const RowFormat* formats = nullptr;  // [experts, count]; null: weights are elements of `dtype`
};

// What an expert is chosen by and counts: its share among all, a number of its own, or the same of the chosen alone.
enum class Scores : int { softmax = 0, sigmoid = 1, softmax_of_chosen = 2, sigmoid_of_chosen = 3, sparse_mixer = 4 };

struct RouteArgs {
  const float* logits;  // [T, E], rows logits_stride apart
  const float* bias;    // [E], added to the scores for the choice alone; or null
  int32_t* experts;     // [T, chosen]
  float* weights;       // [T, chosen]
  int64_t tokens, experts_count, logits_stride, chosen;
  int64_t groups, top_groups, group_best;  // experts of so many groups; by the best one, or the sum of the two best
  Scores scores;
  bool renormalise;  // divide by the chosen ones' sum + added, which is at least `least`
  float added, least, scale;
  float tolerance;  // of the sparse mixer
};

struct SortByExpertArgs {
  const int32_t* experts;  // [T, chosen]
  int32_t* starts;         // [E + 1]
  int64_t* tokens;         // [T * chosen]: of each row
  int32_t* places;         // [T, chosen]: the row of each
  int64_t num_tokens, chosen, experts_count;
};

struct CombineArgs {
  const void* x;             // [rows, C], rows x_stride apart
  const int32_t* places;     // [T, chosen], rows of x
  const float* weights;      // [T, chosen]
  const void* shared;        // [T, C], rows shared_stride apart, or null
  const float* shared_gate;  // [T]: shared counts its logistic function; or null
  void* y;                   // [T, C], contiguous
  int64_t tokens, chosen, channels, x_stride, shared_stride;
  DType dtype;
};

struct AttentionArgs {
  const void* query;           // [T, H, D], tokens query_stride apart
  const void* keys;            // [num_blocks, G, block_size, D], rows key_stride apart
  const void* values;          // [num_blocks, G, block_size, DV], rows value_stride apart
  void* out;                   // [T, H, DV], contiguous
  const int32_t* block_table;  // [S, B], rows table_stride apart
  const int32_t* query_start;  // [S + 1]
  const int32_t* context_len;  // [S]
  int64_t query_stride, table_stride;
  int64_t sequences, heads, kv_heads, head_dim, block_size;
  float scale;
  DType dtype;
  int64_t window = 0;             // a query at position p sees keys from p + 1 - window on; 0: from the first
  const float* slopes = nullptr;  // [H]: ALiBi (arXiv:2108.12409), slope * (key's position - query's) added; or null
  int64_t value_dim = 0, value_stride = 0;  // DV; from a key's value to the next key's
  float softcap = 0;                     // scores become softcap * tanh(score / softcap), before slopes; 0: they stay
  const float* sinks = nullptr;          // [H]: one more score of each head, whose value is 0; or null
  const float* head_scales = nullptr;    // [H]: scores times this too; or null
  const int32_t* visible_end = nullptr;  // [T]: a query sees keys up to this position - 1; null: up to its own
  int64_t chunk = 0;                     // a query sees the keys of its own chunk of so many alone; 0: there are none
  int64_t key_stride = 0;                // from a key to the next one
  // Above 0: keys and values are int8, and so many bytes behind the beginning of each row lies its scale, a float.
  int64_t key_scale_at = 0, value_scale_at = 0;
  // [H, 2 * bias_reach + 1], or null: what is added to a score, by the key's position - query's, from -bias_reach on;
  // what lies further counts as the nearest.
  const float* biases = nullptr;
  int64_t bias_reach = 0;
};

// The first key that a query at a position sees. It does not descend from one position to the next.
inline int64_t first_visible(const AttentionArgs& args, int64_t position) {
  int64_t first = args.window > 0 ? position + 1 - args.window : 0;
  if (args.chunk > 0 && position - position % args.chunk > first) first = position - position % args.chunk;
  return first > 0 ? first : 0;
}

// Where a layer with states has those of the step's sequences. A block has two, each behind so many tokens of its
// sequence as `ends` says: a step reads the one in front of its first token and writes the other, so that it can be run
// again. Where the table has a block, a state is left behind the last of its tokens; the last token's has one.
struct PastArgs {
  const int32_t* block_table;  // [S, B], rows table_stride apart; below 0: no block
  const int32_t* query_start;  // [S + 1]
  const int32_t* context_len;  // [S]
  int64_t* ends;               // [N, 2]; -1: nothing is there
  int64_t sequences, places, table_stride, block_size, num_blocks;
};

// A convolution of each channel with its own past, then SiLU.
struct CausalConvArgs {
  const void* x;        // [T, C], rows x_stride apart
  const void* weight;   // [C, K], contiguous
  const void* bias;     // [C] or null
  const float* scales;  // [C], of x; or null
  void* tails;          // [N, 2, K - 1, C]: the last inputs
  void* y;              // [T, C], contiguous
  int64_t channels, kernel, x_stride;
  DType dtype;
  PastArgs past;
};

// Mamba-2's recurrence (arXiv:2405.21060), token by token: h = h exp(dt A) + dt B x, y = C h + D x.
struct SelectiveScanArgs {
  const void* x;        // [T, H P + 2 G Z]: of each head x, of each group B, then of each C; rows x_stride apart
  const void* dt;       // [T, H], rows dt_stride apart
  const void* a_log;    // [H]: A is -exp of it
  const void* dt_bias;  // [H]
  const void* d;        // [H]
  float* states;        // [N, 2, H, Z, P]
  void* y;              // [T, H P], contiguous
  int64_t x_stride, dt_stride, heads, head_dim, state_size, groups;
  float dt_scale, dt_min, dt_max;  // dt becomes softplus(dt * dt_scale + dt_bias), then within these
  DType dtype;
  PastArgs past;
};

// x or its norm, by groups of channels, times silu(gate * gate_scale).
struct GatedNormArgs {
  const void* x;       // [T, C], rows x_stride apart
  const void* gate;    // [T, C], rows gate_stride apart
  const void* weight;  // [C]; null: there is no norm
  void* y;             // [T, C], contiguous
  int64_t tokens, channels, x_stride, gate_stride, groups;
  float eps, gate_scale;
  bool norm_first;  // the norm is of x alone; else of the product
  DType dtype;
};

struct EmbeddingArgs {
  const int64_t* ids;  // [T], rows of the table
  const void* table;   // [V, C], contiguous
  const void* added;   // [T, C], contiguous, or null
  void* y;             // [T, C], contiguous
  int64_t tokens, channels, table_rows;
  DType dtype;
  float scale = 1;                    // of the table's rows
  const RowFormat* format = nullptr;  // of the table's rows; null: they are elements of `dtype`
  bool packed = false;                // the table, as weights are (cpu/linear/columns.h)
};

// Of heads, x and y are [T, H, C], a token's heads one behind the other; each is normalised by itself.
struct NormArgs {
  const void* x;       // [T, C], rows x_stride apart
  void* residual;      // [T, C], contiguous, or null; null where there are heads
  const void* weight;  // [C] or null
  const void* bias;    // [C] or null
  void* y;             // [T, C], contiguous
  int64_t tokens, channels, x_stride;
  float eps;
  DType dtype;
  float weight_offset = 0;    // added to the weight
  float x_scale = 1;          // x is multiplied by it before it is added to the residual
  int64_t heads = 1;          // H
  int64_t weight_stride = 0;  // from a head's weight (and bias) to the next one's; 0: all have the same
};

struct RotaryArgs {
  void* query;  // [T, H, D], tokens query_stride apart
  void* key;    // [T, G, D], tokens key_stride apart; or null, and G is 0
  const int64_t* positions;
  const float* cos_sin;  // [P, R]: R / 2 cosines, then R / 2 sines
  int64_t query_stride, key_stride;
  int64_t tokens, heads, kv_heads, head_dim, rotary_dim;
  int64_t rows;  // P
  DType dtype;
  bool interleaved = false;  // pairs are (0, 1), (2, 3) .., not (0, R / 2), (1, R / 2 + 1) ..
  int64_t first = 0;         // dimensions first .. first + R of each head are turned
};

// y has the heads of `first`, and behind each that of `second`.
struct JoinHeadsArgs {
  const void* first;   // [T, H, first_size], tokens first_stride and heads first_step apart
  const void* second;  // [T, H, second_size] likewise; or null, and second_size is 0
  void* y;             // [T, H, first_size + second_size], contiguous
  int64_t first_stride, first_step, first_size;
  int64_t second_stride, second_step, second_size;
  int64_t tokens, heads;
  DType dtype;
};

struct ActivationArgs {
  const void* x;  // [T, C], or [T, 2 C] where gated; rows x_stride apart
  void* y;        // [T, C], contiguous
  int64_t tokens, channels, x_stride;
  Activation kind;
  bool gated;
  DType dtype;
};

// y = (clamp(up, -limit, limit) + 1) * gate * sigmoid(alpha * gate), of gate = min(gate, limit).
struct ClampedSwigluArgs {
  const void* x;  // [T, 2 C]: gates, then ups; interleaved: gate, up, gate, up ..; rows x_stride apart
  void* y;        // [T, C], contiguous
  int64_t tokens, channels, x_stride;
  float alpha, limit;
  bool interleaved;
  DType dtype;
};

// xIELU (arXiv:2411.13010): for x > 0, p x^2 + beta x; else n (expm1(min(x, eps)) - x) + beta x, of p = softplus(alpha_p)
// and n = beta + softplus(alpha_n).
struct XieluArgs {
  const void* x;  // [T, C], rows x_stride apart
  const void* alpha_p;
  const void* alpha_n;
  const float* beta;
  const float* eps;
  void* y;  // [T, C], contiguous
  int64_t tokens, channels, x_stride;
  DType dtype;
};

struct AddArgs {
  const void* x;      // [T, C], rows x_stride apart
  const void* added;  // [T, C], rows added_stride apart
  void* y;            // [T, C], contiguous: x + scale * added
  int64_t tokens, channels, x_stride, added_stride;
  float scale;
  DType dtype;
};

struct ScaleArgs {
  const void* x;  // [T, C], rows x_stride apart
  void* y;        // [T, C], contiguous: factor * x, and of that cap * tanh(. / cap) where cap is not 0
  int64_t tokens, channels, x_stride;
  float factor, cap;
  DType dtype;
  float limit = 0;              // y is held between -limit and limit; 0: it is not
  const float* rows = nullptr;  // [T]: each row times its own number, too; or null
};

struct LikeliestArgs {
  const float* logits;  // [R, V], contiguous
  int64_t* tokens;      // [R]: the first of a row's largest logits; -1 where that is NaN or infinite
  int64_t rows, columns;
};

struct SumRowsArgs {
  const void* x;               // [T, C], rows x_stride apart
  const int32_t* query_start;  // [S + 1]: sequence s has the rows query_start[s] .. query_start[s + 1]
  double* sums;                // [S, C]: to which a sequence's rows are added, one after the other
  int64_t tokens, channels, x_stride, sequences;
  DType dtype;
};

struct WriteKvArgs {
  const void* key;    // [T, G, D], tokens key_stride apart
  const void* value;  // [T, G, DV], tokens value_stride apart, or null: keys alone
  void* keys;         // [num_blocks, G, block_size, D]
  void* values;       // [num_blocks, G, block_size, DV], or null
  const int64_t* slots;
  int64_t key_stride, value_stride;
  int64_t tokens, kv_heads, head_dim, block_size, num_blocks, element_bytes;
  int64_t value_dim;  // DV
  // Above 0: the cache's rows are int8, and so many bytes behind the beginning of each lies its scale, a float; from a
  // row to the next one there are key_bytes and value_bytes. dtype: of key and value.
  int64_t key_scale_at = 0, value_scale_at = 0, key_bytes = 0, value_bytes = 0;
  DType dtype = DType::float32;
};

}  // namespace quire

// Paged attention: which kernels run. attention.h says what they have in common.
//
// Sequences of one token and those of more have a kernel each, which passes over the others; heads wider than 256 have
// one for both, and float32 another. Where there are as many
// tokens as sequences, each is taken to have one: a step schedules no sequence without a token.
#include <limits.h>

#include <stdexcept>
#include <string>

#include "cuda/attention/attention.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

int narrow(int64_t x, const char* what) {
  if (x < 0 || x > INT_MAX)
    throw std::invalid_argument(std::string("attention: ") + what + " must be at most 2^31 - 1, not " +
                                std::to_string(x));
  return static_cast<int>(x);
}

void check_size(int64_t size, int64_t most, const char* what) {
  if (size < 1 || size > most)
    throw std::invalid_argument(std::string("attention: the GPU's kernels have ") + what + " of 1 to " +
                                std::to_string(most) + " elements a head, not " + std::to_string(size));
}

Attention prepare(const AttentionArgs& args, const AttentionSizes& sizes) {
  check_size(args.head_dim, kMostKeyDim, "keys");
  check_size(args.value_dim, kMostValueDim, "values");
  if (args.kv_heads < 1 || args.heads % args.kv_heads)
    throw std::invalid_argument("attention: " + std::to_string(args.heads) + " query heads are no multiple of " +
                                std::to_string(args.kv_heads) + " key heads");
  if (args.block_size < 1) throw std::invalid_argument("attention: blocks must have room for a key at least");
  if (args.sequences > 65535 || args.heads > 65535)
    throw std::invalid_argument("attention: at most 65535 sequences and heads a step");
  Attention to{};
  to.query = args.query, to.keys = args.keys, to.values = args.values, to.out = args.out;
  to.block_table = args.block_table, to.query_start = args.query_start, to.context_len = args.context_len;
  to.visible_end = args.visible_end;
  to.slopes = args.slopes, to.sinks = args.sinks, to.head_scales = args.head_scales;
  to.query_stride = args.query_stride, to.table_stride = args.table_stride, to.num_blocks = sizes.num_blocks;
  to.value_stride = args.value_stride;
  to.tokens = narrow(sizes.tokens, "tokens"), to.sequences = narrow(args.sequences, "sequences");
  to.heads = narrow(args.heads, "heads"), to.kv_heads = narrow(args.kv_heads, "key heads");
  to.group = to.heads / to.kv_heads;
  to.head_dim = static_cast<int>(args.head_dim), to.value_dim = static_cast<int>(args.value_dim);
  to.block_size = narrow(args.block_size, "a block's size"), to.table_width = narrow(sizes.table_width, "blocks");
  narrow(sizes.tokens * to.group, "tokens times heads of a group");
  narrow(args.sequences * args.heads, "sequences times heads");
  // A tile beyond the last key must not overflow.
  to.capacity = static_cast<int>(min(args.block_size * sizes.table_width, int64_t{1} << 30));
  to.window = args.window > 0 ? static_cast<int>(min(args.window, int64_t{INT_MAX})) : INT_MAX;
  to.chunk = static_cast<int>(min(args.chunk, int64_t{INT_MAX}));
  // Never 0: -inf has no weight then either.
  to.factor = fmaxf(fabsf(args.scale) * (args.softcap > 0 ? 1.0f / args.softcap : kLog2e), 1.17549435e-38f);
  to.cap = args.softcap > 0 ? args.softcap * kLog2e : 0.0f;
  to.negative = args.scale < 0;
  to.shaped = to.slopes || to.head_scales || to.cap > 0;
  to.wide = args.head_dim % 8 == 0 && args.value_dim % 8 == 0 && args.query_stride % 8 == 0 &&
            args.value_stride % 8 == 0 && are_aligned(args.query, args.keys, args.values, args.out);
  return to;
}

}  // namespace

int64_t attention_workspace(const AttentionArgs& args, const AttentionSizes& sizes) {
  return args.dtype == DType::float32 ? 0 : partial_bytes(prepare(args, sizes));
}

void paged_attention(const AttentionArgs& args, const AttentionSizes& sizes, void* workspace, Stream stream) {
  const Attention prepared = prepare(args, sizes);
  if (prepared.tokens == 0 || prepared.sequences == 0) return;
  if (args.dtype == DType::float32) return attend_float(prepared, stream);
  float* partial = partial_bytes(prepared) ? static_cast<float*>(workspace) : nullptr;
  Attention singles = prepared;
  singles.visible_end = nullptr;  // a context's last token sees all of it
  const bool others = prepared.tokens != prepared.sequences;
  if (max(prepared.head_dim, prepared.value_dim) > kMostHeadDim) {
    attend_wide_single(singles, args.dtype, partial, stream);
    if (others) attend_wide_many(prepared, args.dtype, stream);
  } else {
    attend_single(singles, args.dtype, partial, stream);
    if (others) attend_many(prepared, args.dtype, stream);
  }
}

}  // namespace quire::cuda

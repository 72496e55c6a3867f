// The copy of new keys and values into their cache slots.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 16384;  // about 5 microseconds on one core

}  // namespace

void write_kv(const WriteKvArgs& args) {
  const auto copy = [&](const void* from, int64_t stride, void* to, int64_t dim, int64_t t, int64_t slot) {
    const int64_t bytes = dim * args.element_bytes;
    const char* heads = static_cast<const char*>(from) + t * stride * args.element_bytes;
    const int64_t block = slot / args.block_size, offset = slot % args.block_size;
    char* head = static_cast<char*>(to) + (block * args.kv_heads * args.block_size + offset) * bytes;
    for (int64_t g = 0; g < args.kv_heads; ++g)
      __builtin_memcpy(head + g * args.block_size * bytes, heads + g * bytes, bytes);
  };
  const int64_t grain = 8 * kGrainElements / (args.kv_heads * (args.head_dim + args.value_dim) + 1);
  parallel_for(args.tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      copy(args.key, args.key_stride, args.keys, args.head_dim, t, args.slots[t]);
      if (args.value) copy(args.value, args.value_stride, args.values, args.value_dim, t, args.slots[t]);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

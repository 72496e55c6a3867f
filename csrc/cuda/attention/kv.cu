// Keys and values: new ones into their slots, and whole blocks from place to place. Bytes are moved as they are.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kChunk = 16 * 1024;    // bytes of a block of keys that one block of threads moves
constexpr int64_t kMostColumns = 65535;  // of a grid, in blocks

// A token's rows, one for each head, to their place in a cache.
template <class Word>
__device__ __forceinline__ void write_rows(const WriteKvArgs& args, const void* from, int64_t stride, void* cache,
                                           int64_t row_words, int64_t slot) {
  const int size = static_cast<int>(row_words), words = static_cast<int>(args.kv_heads) * size;
  const Word* rows = static_cast<const Word*>(from) + static_cast<int64_t>(blockIdx.x) * stride;
  const int64_t block = slot / args.block_size, offset = slot % args.block_size;
  Word* to = static_cast<Word*>(cache) + (block * args.kv_heads * args.block_size + offset) * size;
  for (int i = static_cast<int>(threadIdx.x); i < words; i += kThreads)
    to[i / size * args.block_size * size + i % size] = rows[i];
}

// One block of threads a token, for its keys and its values. Word: what is moved at a time; strides and sizes in words.
template <class Word>
__global__ void __launch_bounds__(kThreads) write_kv_kernel(WriteKvArgs args) {
  const int64_t slot = args.slots[blockIdx.x];
  if (slot < 0 || slot >= args.num_blocks * args.block_size) return;
  write_rows<Word>(args, args.key, args.key_stride, args.keys, args.head_dim, slot);
  if (args.value) write_rows<Word>(args, args.value, args.value_stride, args.values, args.value_dim, slot);
}

struct Move {
  void* const* caches;
  int64_t num_caches, num_blocks, block_bytes;
  const int64_t *from, *to;  // blocks of the caches; null: `packed`
  const char* packed_from;
  char* packed_to;
};

template <class Word>
__device__ __forceinline__ void move_words(char* to, const char* from, int64_t bytes) {
  const int64_t words = bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t step = static_cast<int64_t>(gridDim.y) * kThreads;
#pragma unroll 4
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x; i < words; i += step)
    reinterpret_cast<Word*>(to)[i] = reinterpret_cast<const Word*>(from)[i];
}

// blockIdx.x: one block of one cache; blockIdx.y: a share of it.
__global__ void __launch_bounds__(kThreads) move_kernel(Move args) {
  const int64_t place = blockIdx.x, i = place / args.num_caches, bytes = args.block_bytes;
  const int64_t from = args.from ? args.from[i] : 0, to = args.to ? args.to[i] : 0;
  if (from < 0 || from >= args.num_blocks || to < 0 || to >= args.num_blocks) return;
  char* cache = static_cast<char*>(args.caches[place % args.num_caches]);
  const char* source = args.from ? cache + from * bytes : args.packed_from + place * bytes;
  char* target = args.to ? cache + to * bytes : args.packed_to + place * bytes;
  const uintptr_t all =
      reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target) | static_cast<uintptr_t>(bytes);
  if (all % 16 == 0) {
    move_words<uint4>(target, source, bytes);
  } else if (all % 4 == 0) {
    move_words<uint32_t>(target, source, bytes);
  } else {
    move_words<uint16_t>(target, source, bytes);
  }
}

void move(const BlockArgs& args, const int64_t* from, const int64_t* to, const void* packed_from, void* packed_to,
          Stream stream) {
  const int64_t columns = divide_up(args.block_bytes, kChunk);
  const dim3 grid(static_cast<unsigned>(args.count * args.num_caches),
                  static_cast<unsigned>(columns < kMostColumns ? columns : kMostColumns));
  const Move moves{args.caches,
                   args.num_caches,
                   args.num_blocks,
                   args.block_bytes,
                   from,
                   to,
                   static_cast<const char*>(packed_from),
                   static_cast<char*>(packed_to)};
  launch(move_kernel, grid, dim3(kThreads), 0, stream, moves);
}

}  // namespace

void write_kv(const WriteKvArgs& args, Stream stream) {
  const int64_t bytes = args.element_bytes;
  const auto in_words = [&](int64_t elements) { return elements * bytes % 16 == 0; };
  const bool wide = in_words(args.head_dim) && in_words(args.value_dim) && in_words(args.key_stride) &&
                    in_words(args.value_stride) && are_aligned(args.key, args.value, args.keys, args.values);
  WriteKvArgs words = args;
  if (wide) {
    words.head_dim = args.head_dim * bytes / 16;
    words.value_dim = args.value_dim * bytes / 16;
    words.key_stride = args.key_stride * bytes / 16;
    words.value_stride = args.value_stride * bytes / 16;
  }
  launch(wide         ? write_kv_kernel<uint4>
         : bytes == 4 ? write_kv_kernel<uint32_t>
                      : write_kv_kernel<uint16_t>,
         dim3(static_cast<unsigned>(args.tokens)), dim3(kThreads), 0, stream, words);
}

void copy_blocks(const BlockArgs& args, Stream stream) { move(args, args.from, args.to, nullptr, nullptr, stream); }

void gather_blocks(const BlockArgs& args, void* packed, Stream stream) {
  move(args, args.from, nullptr, nullptr, packed, stream);
}

void scatter_blocks(const BlockArgs& args, const void* packed, Stream stream) {
  move(args, nullptr, args.to, packed, nullptr, stream);
}

}  // namespace quire::cuda

// A tile of 64 keys on tensor cores: how it comes to shared memory, and what is done with it.
//
// Rows in shared memory have kD elements (a multiple of 64), in runs of 8; run c of row r lies at c ^ (r % 8), so that
// 8 rows' runs c lie in different banks. A warp's rows are those of mma's fragments: lane l has row l / 4 ("half 0") and
// l / 4 + 8.
#pragma once

#include <type_traits>

#include "cuda/attention/attention_work.h"

namespace quire::cuda {

template <int kD>
__device__ __forceinline__ int swizzled(int row, int run) {
  return row * kD + ((run ^ (row & 7)) << 3);
}

// Brings the tiles first .. last of a sequence's keys and values to shared memory, kStages ahead. All threads of the
// block call everything; they have kThreads. Keys' rows have kD elements there, values' kValueD.
template <class T, int kD, int kStages, int kThreads, int kValueD = kD>
class Tiles {
 public:
  // Keys, values, and where the rows of two tiles are.
  static constexpr int kRowBytes = 2 * 2 * kKeys * static_cast<int>(sizeof(int64_t));
  static constexpr int kBytes = kStages * kKeys * (kD + kValueD) * static_cast<int>(sizeof(T)) + kRowBytes;

  // Keys before `begin`, which lies in the first tile, and from `end` on read as zeros.
  __device__ __forceinline__ Tiles(const Attention& args, char* shared, int sequence, int kv_head, Range range,
                                   int begin, int end)
      : args_(args), table_(args.block_table + sequence * args.table_stride), rows_(reinterpret_cast<int64_t*>(shared)),
        keys_(reinterpret_cast<T*>(shared + kRowBytes)), kv_head_(kv_head), first_(range.first), last_(range.last),
        end_(end) {
    look_up(first_, begin);
    for (int i = 0; i < kStages; ++i) find_rows(first_ + i);
    __syncthreads();
    for (int i = 0; i < kStages; ++i) {
      if (i) load_values(first_ + i - 1);
      load_keys(first_ + i);
    }
  }

  // Waits for a tile's keys. To be called for each tile in order, each followed by `values`.
  __device__ __forceinline__ const T* keys(int tile) {
    copy_async_wait<2 * (kStages - 1)>();
    __syncthreads();  // nobody reads the values of the tile before any more
    load_values(tile + kStages - 1);
    find_rows(tile + kStages);
    return keys_ + stage(tile) * kKeys * kD;
  }
  // Waits for its values; its keys are no longer there afterwards.
  __device__ __forceinline__ const T* values(int tile) {
    copy_async_wait<2 * (kStages - 1)>();
    __syncthreads();
    load_keys(tile + kStages);
    return keys_ + values_at(tile);
  }

 private:
  __device__ __forceinline__ int stage(int tile) const { return kStages == 1 ? 0 : (tile - first_) % kStages; }
  __device__ __forceinline__ int values_at(int tile) const { return kKeys * (kStages * kD + stage(tile) * kValueD); }

  // One thread for each row reads where its block is: a tile ahead of `find_rows`, which then need not wait for it.
  __device__ __forceinline__ void look_up(int tile, int begin = 0) {
    const int position = tile * kKeys + static_cast<int>(threadIdx.x);
    const bool seen = threadIdx.x < kKeys && position >= begin && position < end_;
    block_ = seen ? block_at(args_, table_, position) : -1;
  }
  __device__ __forceinline__ void find_rows(int tile) {
    if (threadIdx.x < kKeys) {
      const int position = tile * kKeys + static_cast<int>(threadIdx.x);
      const int64_t row = row_at(args_, block_, kv_head_, position);
      int64_t* rows = rows_ + (tile & 1) * 2 * kKeys + threadIdx.x;
      rows[0] = row * args_.head_dim;
      rows[kKeys] = row * args_.value_stride;
    }
    look_up(tile + 1);
  }
  __device__ __forceinline__ void load_keys(int tile) {
    if (tile <= last_) load<kD>(args_.keys, 0, args_.head_dim, tile, keys_ + stage(tile) * kKeys * kD);
    copy_async_commit();
  }
  __device__ __forceinline__ void load_values(int tile) {
    if (tile <= last_) load<kValueD>(args_.values, kKeys, args_.value_dim, tile, keys_ + values_at(tile));
    copy_async_commit();
  }
  // Rows of `size` elements; `place`: where they are is said among rows_.
  template <int kWidth>
  __device__ __forceinline__ void load(const void* pool, int place, int size, int tile, T* to) {
    constexpr int kRuns = kWidth / 8;
    const T* from = static_cast<const T*>(pool);
    const int64_t* rows = rows_ + (tile & 1) * 2 * kKeys + place;
    if (args_.wide) {
      const auto copy = [&](int row, int run) {
        const int64_t at = rows[row];
        const bool valid = 8 * run < size && at >= 0;
        copy_async16(to + swizzled<kWidth>(row, run), from + (valid ? at + 8 * run : 0), valid);
      };
      if constexpr (kThreads % kRuns == 0) {
        const int run = static_cast<int>(threadIdx.x) % kRuns;
#pragma unroll
        for (int i = 0; i < kKeys * kRuns / kThreads; ++i)
          copy(static_cast<int>(threadIdx.x) / kRuns + i * (kThreads / kRuns), run);
      } else {
        for (int i = static_cast<int>(threadIdx.x); i < kKeys * kRuns; i += kThreads) copy(i / kRuns, i % kRuns);
      }
    } else {
      for (int i = static_cast<int>(threadIdx.x); i < kKeys * kRuns; i += kThreads) {
        const int row = i / kRuns, run = i % kRuns;
        const int64_t at = rows[row];
        for (int j = 0; j < 8; ++j) {
          const int column = 8 * run + j;
          to[swizzled<kWidth>(row, run) + j] = at >= 0 && column < size ? from[at + column] : T{0};
        }
      }
    }
  }

  const Attention& args_;
  const int32_t* table_;
  int64_t* rows_;  // [2 (even tiles, odd), 2 (keys, values), kKeys], in elements; below 0: zeros
  T* keys_;        // [kStages, kKeys, kD], then values [kStages, kKeys, kValueD]
  int kv_head_, first_, last_, end_, block_;
};

// Columns `column`, + 1 of a query's row (null: zeros).
template <class T>
__device__ __forceinline__ uint32_t query_pair(const Attention& args, const T* row, int column) {
  uint32_t pair = 0;
  if (row && column < args.head_dim) {
    if (args.wide) {
      pair = *reinterpret_cast<const uint32_t*>(row + column);
    } else {
      pair = row[column].bits;
      if (column + 1 < args.head_dim) pair |= static_cast<uint32_t>(row[column + 1].bits) << 16;
    }
  }
  return args.negative ? pair ^ 0x80008000u : pair;
}

template <class T>
__device__ __forceinline__ void store_pair(const Attention& args, T* row, int column, float low, float high) {
  if (args.wide) {
    if (column < args.value_dim) *reinterpret_cast<uint32_t*>(row + column) = pack2<T>(low, high);
  } else {
    if (column < args.value_dim) row[column] = from_float<T>(low);
    if (column + 1 < args.value_dim) row[column + 1] = from_float<T>(high);
  }
}

// A warp's 16 query rows as fragments; `rows` are this lane's two.
template <class T, int kD>
struct Query {
  static constexpr int kBytes = 0;  // of shared memory, for each warp
  uint32_t fragments[kD / 16][4];

  __device__ __forceinline__ void load(const Attention& args, const T* const (&rows)[2], char*) {
    const int pair = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
    for (int c = 0; c < kD / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) fragments[c][i] = query_pair(args, rows[i % 2], 16 * c + 8 * (i / 2) + pair);
  }
  __device__ __forceinline__ void get(int c, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = fragments[c][i];
  }
};

// The same where there are no registers for them: each lane keeps its own in shared memory.
template <class T, int kD>
struct SharedQuery {
  static constexpr int kBytes = kD / 16 * kWarp * 16;
  uint4* fragments;

  __device__ __forceinline__ void load(const Attention& args, const T* const (&rows)[2], char* shared) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), pair = 2 * (lane % 4);
    fragments = reinterpret_cast<uint4*>(shared + threadIdx.x / kWarp * kBytes) + lane;
    for (int c = 0; c < kD / 16; ++c)
      fragments[c * kWarp] =
          make_uint4(query_pair(args, rows[0], 16 * c + pair), query_pair(args, rows[1], 16 * c + pair),
                     query_pair(args, rows[0], 16 * c + 8 + pair), query_pair(args, rows[1], 16 * c + 8 + pair));
  }
  __device__ __forceinline__ void get(int c, uint32_t (&a)[4]) const {
    const uint4 words = fragments[c * kWarp];
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  }
};

// The same for all warps of a block, which have the same rows. To be read after the next barrier.
template <class T, int kD>
struct CommonQuery {
  static constexpr int kBytes = kD / 16 * kWarp * 16;
  const uint4* fragments;

  __device__ __forceinline__ void load(const Attention& args, const T* const (&rows)[2], char* shared) {
    const int lane = static_cast<int>(threadIdx.x % kWarp), pair = 2 * (lane % 4);
    uint4* own = reinterpret_cast<uint4*>(shared) + lane;
    for (int c = static_cast<int>(threadIdx.x) / kWarp; c < kD / 16; c += static_cast<int>(blockDim.x) / kWarp)
      own[c * kWarp] =
          make_uint4(query_pair(args, rows[0], 16 * c + pair), query_pair(args, rows[1], 16 * c + pair),
                     query_pair(args, rows[0], 16 * c + 8 + pair), query_pair(args, rows[1], 16 * c + 8 + pair));
    fragments = own;
  }
  __device__ __forceinline__ void get(int c, uint32_t (&a)[4]) const {
    const uint4 words = fragments[c * kWarp];
    a[0] = words.x, a[1] = words.y, a[2] = words.z, a[3] = words.w;
  }
};

// scores = the query's rows times the keys `key`, + 1, ... (8 kTiles of them) of a tile.
template <class T, int kD, int kTiles, class AnyQuery>
__device__ __forceinline__ void multiply_keys(float (&scores)[kTiles][4], const AnyQuery& query, const T* keys,
                                              int key) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = 0;
  if constexpr (kTiles == 1) {  // one load brings two steps' columns of 8 keys, not one step's of 16
#pragma unroll 4
    for (int c = 0; c < kD / 16; c += 2) {
      uint32_t a[4], next[4], b[4];
      query.get(c, a), query.get(c + 1, next);
      ldmatrix4(b, keys + swizzled<kD>(key + lane % 8, 2 * c + lane / 8));
      mma<T>(scores[0], a, {b[0], b[1]});
      mma<T>(scores[0], next, {b[2], b[3]});
    }
  } else {
    const int row = key + lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
    for (int c = 0; c < kD / 16; ++c) {
      uint32_t a[4];
      query.get(c, a);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        ldmatrix4(b, keys + swizzled<kD>(row, 2 * c + half) + n * 8 * kD);
        mma<T>(scores[n], a, {b[0], b[1]});
        mma<T>(scores[n + 1], a, {b[2], b[3]});
      }
    }
  }
}

// Makes scores of products, and -inf for keys that a row does not see. `key`: the scores' first. `edge`: whether there
// may be such keys. `rows`: in shared memory, this lane's two, 8 apart. Where scores are shaped, they come out scaled;
// else their weights' factor is still to be applied.
template <bool kShaped, int kTiles>
__device__ __forceinline__ void mask(float (&scores)[kTiles][4], const Attention& args, const Row* rows, int key,
                                     bool edge) {
  if (!kShaped && !edge) return;
  key += 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Row row = rows[8 * half];
    const int begin = edge ? first_visible(args, row.position) : 0;
    Shape shape;
    if (kShaped) shape = Shape(args, row.head);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = key + 8 * n + i;
        float& score = scores[n][2 * half + i];
        if (kShaped) score = shape.score(score, row.position - at, args.cap);
        if (edge && (at >= row.end || at < begin)) score = -INFINITY;
      }
    }
  }
}

// Where warps make the scores of some keys each and all want those of 64, they go through shared memory. Floats between
// rows there: 16 lanes with 8 bytes each meet no bank twice.
constexpr int kScoreStride = kKeys + 8;

// A lane's scores, of both its rows, at `to`: its first row's.
template <int kTiles>
__device__ __forceinline__ void write_scores(const float (&scores)[kTiles][4], float* to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<float2*>(to + 8 * half * kScoreStride + 8 * n) =
          make_float2(scores[n][2 * half], scores[n][2 * half + 1]);
}
// Its share of a row.
__device__ __forceinline__ void read_scores(float (&scores)[8][2], const float* from) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(from + 8 * n);
    scores[n][0] = two.x, scores[n][1] = two.y;
  }
}

// A warp's 16 rows, kTiles x 8 columns of the values: the state of a span.
template <class T, int kD, int kTiles>
struct State {
  float values[kTiles][4];
  float sums[4];  // of halves 0, 0, 1, 1, each twice
  float largest[2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) values[n][i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = 0;
    largest[0] = largest[1] = -INFINITY;
  }

  // Turns a tile's scores of one half into weights, as of A fragments, and brings the state to their largest.
  template <int kHalf>
  __device__ __forceinline__ void weigh(const float (&scores)[8][2], float factor, uint32_t (&weights)[4][4]) {
    float best = -INFINITY;
#pragma unroll
    for (int n = 0; n < 8; ++n) best = fmaxf(best, fmaxf(scores[n][0], scores[n][1]));
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 1));
    best = fmaxf(best, __shfl_xor_sync(kAllLanes, best, 2));
    best = fmaxf(best, largest[kHalf]);
    const float finite = finite_or_zero(best), old = weight_of(largest[kHalf], finite, factor);
    largest[kHalf] = best;
#pragma unroll
    for (int i = 2 * kHalf; i < 2 * kHalf + 2; ++i) {
      sums[i] *= old;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) values[n][i] *= old;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
      weights[n / 2][n % 2 * 2 + kHalf] =
          pack2<T>(weight_of(scores[n][0], finite, factor), weight_of(scores[n][1], finite, factor));
  }

  // Adds the weights times a tile's values (rows of kD), columns 8 `run` and on.
  __device__ __forceinline__ void multiply_values(const uint32_t (&weights)[4][4], const T* tile, int run) {
    constexpr uint32_t kOnes = std::is_same_v<T, bf16> ? 0x3f803f80u : 0x3c003c00u;
    const int lane = static_cast<int>(threadIdx.x % kWarp);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      mma<T>(sums, weights[c], {kOnes, kOnes});
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        uint32_t b[4];
        ldmatrix4_transposed(b, tile + swizzled<kD>(16 * c + lane % 16, run + n + lane / 16));
        mma<T>(values[n], weights[c], {b[0], b[1]});
        mma<T>(values[n + 1], weights[c], {b[2], b[3]});
      }
    }
  }
};

// Calls function(std::integral_constant<int, kD>{}) for the padded size of keys and values.
template <class Function>
void for_head_dim(const Attention& args, const Function& function) {
  const int head_dim = max(args.head_dim, args.value_dim);
  if (head_dim <= 64) return function(std::integral_constant<int, 64>{});
  if (head_dim <= 128) return function(std::integral_constant<int, 128>{});
  return function(std::integral_constant<int, 256>{});
}

// Calls function(T{}, std::bool_constant<kShaped>{}).
template <class Function>
void for_kind(const Attention& args, DType dtype, const Function& function) {
  const auto with = [&](auto zero) {
    if (args.shaped) return function(zero, std::true_type{});
    return function(zero, std::false_type{});
  };
  return dtype == DType::bfloat16 ? with(bf16{}) : with(f16{});
}

}  // namespace quire::cuda

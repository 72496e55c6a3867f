// Draws of tokens: one block of threads for each, whatever shares the call.
//
// Everything that is summed is an integer, so that no sum depends on its order: a token's weight, relative to the best
// token's, in units of 2^-40. What top_k and top_p keep is all tokens above a logit, and the first few by id of those
// equal to it; that logit is found bits at a time, from histograms of how many tokens, or how much weight, have them
// (a radix selection: the vocabulary is not sorted). The draw itself goes in order of ids.
#include "cuda/common/kernels.h"
#include "cuda/common/vectors.h"

namespace quire::cuda {
namespace {

static_assert(sizeof(Draw) == 32 && offsetof(Draw, row) == 0 && offsetof(Draw, uniform) == 8 &&
                  offsetof(Draw, temperature) == 16 && offsetof(Draw, top_p) == 20 && offsetof(Draw, min_p) == 24 &&
                  offsetof(Draw, top_k) == 28,
              "as kernels/sampling.py writes it");

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBits = 11;  // looked at at a time: 11, 11 and the last 10
constexpr int kBins = 1 << kBits;
constexpr float kUnit = 1099511627776.0f;  // 2^40

// An integer that orders as the float does; -0 is 0. Of numbers alone.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t key) {
  return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

struct Row {
  const float* logits;
  int64_t vocabulary;
  float best, temperature, min_p;

  // At most 2^40, and just that for the best; 0 for what is ruled out. 2^20 of them add up to less than 2^64.
  __device__ __forceinline__ uint64_t weight(float logit) const {
    const float x = expf((logit - best) / temperature);
    return x < min_p ? 0 : static_cast<uint64_t>(llrintf(x * kUnit));
  }
};

// The tokens whose logit is above `key`, and the first `ties` by id of those equal to it.
struct Kept {
  uint32_t key;
  uint64_t ties;
};

// Calls function(logit, id) for every token, thread by thread. kStep: tokens that a thread takes at a time.
template <int kStep, class Function>
__device__ __forceinline__ void for_each(const float* logits, int64_t vocabulary, const Function& function) {
#pragma unroll 2
  for (int64_t i = threadIdx.x * kStep; i < vocabulary; i += kThreads * kStep) {
    float some[kStep];
    if (kStep == 1 || i + kStep <= vocabulary) {
      load<kStep>(some, logits + i);
      for (int j = 0; j < kStep; ++j) function(some[j], i + j);
    } else {
      for (int j = 0; i + j < vocabulary; ++j) function(logits[i + j], i + j);
    }
  }
}

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, x, step);
    x = other > x ? other : x;
  }
  return x;
}

__device__ __forceinline__ uint64_t warp_total(uint64_t x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// The sum over this lane and those before it.
__device__ __forceinline__ uint64_t warp_scan(uint64_t x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t other = __shfl_up_sync(kAllLanes, x, step);
    if (lane >= step) x += other;
  }
  return x;
}

// Sums of 64 bits in two words: shared memory adds 32 at a time.
struct Histogram {
  uint32_t low[kBins], high[kBins];
};

__device__ __forceinline__ void add(Histogram& histogram, uint32_t bin, uint64_t amount) {
  const auto low = static_cast<uint32_t>(amount);
  auto high = static_cast<uint32_t>(amount >> 32);
  if (low) high += atomicAdd(&histogram.low[bin], low) > ~low;  // the carry
  if (high) atomicAdd(&histogram.high[bin], high);
}

struct Scratch {
  Histogram histogram;
  uint64_t parts[kWarps], counts[kWarps];
  uint64_t found_above, total;
  uint32_t found_bin;
};

// The highest bin that, with all above it, holds `wanted`, of at most their total; and what lies above it. All threads;
// `choose` makes the wanted amount of the total.
template <class Choose>
__device__ __forceinline__ void find_bin(Scratch& shared, const Choose& choose) {
  const uint32_t thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  const uint32_t bin = kBins - 1 - 2 * thread;  // and the one below
  const Histogram& histogram = shared.histogram;
  const uint64_t first = static_cast<uint64_t>(histogram.high[bin]) << 32 | histogram.low[bin];
  const uint64_t second = static_cast<uint64_t>(histogram.high[bin - 1]) << 32 | histogram.low[bin - 1];
  uint64_t sum = warp_scan(first + second);
  if (lane == kWarp - 1) shared.parts[warp] = sum;
  __syncthreads();
  const uint64_t warps = warp_scan(shared.parts[lane]);
  const uint64_t before = __shfl_sync(kAllLanes, warps, static_cast<int>(warp)) - shared.parts[warp];
  const uint64_t total = __shfl_sync(kAllLanes, warps, kWarp - 1), wanted = choose(total);
  sum += before;
  const uint64_t above = sum - first - second;
  if (above < wanted && wanted <= sum) {  // one thread
    const bool lower = above + first < wanted;
    shared.found_bin = lower ? bin - 1 : bin;
    shared.found_above = lower ? above + first : above;
  }
  if (thread == 0) shared.total = total;
  __syncthreads();
}
static_assert(kBins == 2 * kThreads, "a thread has two bins");

// Looks bit by bit for the logit at which the wanted amount is reached. amount(key, logit, function) calls
// function(amount) or does not; extra is added to the tokens that have `extra_key`. Returns the key, and in `rest` how
// much of the wanted amount tokens of that key must make up: at least 1.
template <int kStep, class Amount, class Choose>
__device__ __forceinline__ uint32_t select(Scratch& shared, const Row& row, const Amount& amount, uint32_t extra_key,
                                           uint64_t extra, const Choose& choose, uint64_t& rest) {
  uint32_t prefix = 0;
  int known = 0;  // bits of `prefix`
  while (known < 32) {
    const int bits = 32 - known < kBits ? 32 - known : kBits, shift = 32 - known - bits;
    const auto bin_of = [&](uint32_t key) { return key >> shift & ((1u << bits) - 1); };
    const auto belongs = [&](uint32_t key) { return known == 0 || key >> (shift + bits) == prefix; };
    __syncthreads();  // the bins of before may still be read
    for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads)
      shared.histogram.low[i] = shared.histogram.high[i] = 0;
    __syncthreads();
    for_each<kStep>(row.logits, row.vocabulary, [&](float logit, int64_t) {
      const uint32_t key = ordered(logit);
      if (belongs(key)) add(shared.histogram, bin_of(key), amount(key, logit));
    });
    if (threadIdx.x == 0 && belongs(extra_key)) add(shared.histogram, bin_of(extra_key), extra);
    __syncthreads();
    if (known == 0) {
      find_bin(shared, choose);
      rest = choose(shared.total);
    } else {
      find_bin(shared, [&](uint64_t) { return rest; });
    }
    rest -= shared.found_above;
    prefix = prefix << bits | shared.found_bin;
    known += bits;
  }
  return prefix;
}

// ceil(share * total) for a share above 0 and below 1, exactly; at least 1.
__device__ __forceinline__ uint64_t share_of(float share, uint64_t total) {
  const auto factor = static_cast<uint64_t>(static_cast<double>(share) * 18446744073709551616.0);
  const uint64_t whole = __umul64hi(factor, total) + (factor * total != 0);
  return whole ? whole : 1;
}

template <int kStep>
__global__ void __launch_bounds__(kThreads) sample_kernel(const float* logits, int64_t vocabulary,
                                                                      int64_t stride, const Draw* draws,
                                                                      int64_t* tokens) {
  __shared__ Scratch shared;
  const Draw draw = draws[blockIdx.x];
  int64_t* token = tokens + blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  if (draw.row < 0 || vocabulary <= 0) {
    if (threadIdx.x == 0) *token = -1;
    return;
  }
  Row row{logits + draw.row * stride, vocabulary, 0.0f, draw.temperature, draw.min_p};

  // The largest logit, and the lowest id that has it. NaN is larger than all.
  uint64_t best = 0;
  for_each<kStep>(row.logits, vocabulary, [&](float logit, int64_t id) {
    const uint32_t key = isnan(logit) ? 0xffffffffu : ordered(logit);
    const uint64_t own = static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(id));
    best = own > best ? own : best;
  });
  best = warp_max(best);
  if (lane == 0) shared.parts[warp] = best;
  __syncthreads();
  best = warp_max(shared.parts[lane]);
  __syncthreads();  // `parts` is written again
  row.best = from_ordered(static_cast<uint32_t>(best >> 32));
  const bool finite = isfinite(row.best);
  if (!finite || !(draw.temperature > 0)) {
    if (threadIdx.x == 0) *token = finite ? int64_t{0xffffffffu - static_cast<uint32_t>(best)} : int64_t{-1};
    return;
  }

  Kept kept{0, 0};  // no number's key is 0
  if (draw.top_k > 0 && draw.top_k < vocabulary) {
    const auto count = [](uint32_t, float) { return uint64_t{1}; };
    const auto wanted = [&](uint64_t) { return static_cast<uint64_t>(draw.top_k); };
    kept.key = select<kStep>(shared, row, count, 0, 0, wanted, kept.ties);
  }
  if (draw.top_p < 1) {
    const auto weight = [&](uint32_t key, float logit) { return key > kept.key ? row.weight(logit) : 0; };
    const auto limit = [&](uint64_t total) { return draw.top_p > 0 ? share_of(draw.top_p, total) : uint64_t{1}; };
    const uint64_t extra = kept.ties ? kept.ties * row.weight(from_ordered(kept.key)) : 0;
    uint64_t rest = 0;
    const uint32_t key = select<kStep>(shared, row, weight, kept.key, extra, limit, rest);
    const uint64_t each = row.weight(from_ordered(key));  // tokens of one logit weigh the same
    kept = {key, (rest + each - 1) / each};
  }

  // Narrow down the ids by what each warp's share of them weighs, until a warp's lanes have one each.
  const auto bits = static_cast<uint64_t>(draw.uniform * 9007199254740992.0);  // 53 of them
  const uint64_t tie_weight = kept.ties ? row.weight(from_ordered(kept.key)) : 0;
  int64_t first = 0, size = vocabulary;
  uint64_t before = 0, ties_before = 0, target = 0;  // before: what the ids below `first` weigh
  do {
    const int64_t share = divide_up(divide_up(size, kWarps), kWarp) * kWarp;
    const int64_t begin = first + warp * share;
    int64_t end = begin + share;
    end = end < first + size ? end : first + size;
    uint64_t sum = 0, ties = 0;
#pragma unroll 4
    for (int64_t i = begin + lane; i < end; i += kWarp) {
      const float logit = row.logits[i];
      const uint32_t key = ordered(logit);
      sum += key > kept.key ? row.weight(logit) : 0;
      ties += key == kept.key;
    }
    sum = warp_total(sum);
    ties = warp_total(ties);
    if (lane == 0) shared.parts[warp] = sum, shared.counts[warp] = ties;
    __syncthreads();
    // Every warp does the same: lane l has the share of warp l.
    const uint64_t own_ties = shared.counts[lane], seen = ties_before + warp_scan(own_ties);
    const auto counted = [&](uint64_t n) { return n < kept.ties ? n : kept.ties; };
    const uint64_t own = shared.parts[lane] + (counted(seen) - counted(seen - own_ties)) * tie_weight;
    const uint64_t reached = before + warp_scan(own);
    if (size == vocabulary) target = __umul64hi(bits << 11, __shfl_sync(kAllLanes, reached, kWarp - 1));
    const int chosen = __ffs(static_cast<int>(__ballot_sync(kAllLanes, reached > target))) - 1;
    before = __shfl_sync(kAllLanes, reached - own, chosen);
    ties_before = __shfl_sync(kAllLanes, seen - own_ties, chosen);
    size = size - chosen * share < share ? size - chosen * share : share;
    first += chosen * share;
    __syncthreads();
  } while (size > kWarp);

  if (warp) return;
  const float logit = lane < size ? row.logits[first + lane] : -INFINITY;
  const uint32_t key = ordered(logit);
  const uint64_t seen = ties_before + warp_scan(key == kept.key);
  const bool is_kept = key > kept.key || (key == kept.key && seen <= kept.ties);
  const uint64_t reached = before + warp_scan(lane < size && is_kept ? row.weight(logit) : 0);
  const int chosen = __ffs(static_cast<int>(__ballot_sync(kAllLanes, reached > target))) - 1;
  if (lane == 0) *token = first + chosen;
}

}  // namespace

void sample(const float* logits, int64_t vocabulary, int64_t stride, const Draw* draws, int64_t count, int64_t* tokens,
            Stream stream) {
  const bool wide = stride % 4 == 0 && are_aligned(logits);
  launch(wide ? sample_kernel<4> : sample_kernel<1>, dim3(static_cast<unsigned>(count)), dim3(kThreads), 0, stream,
         logits, vocabulary, stride, draws, tokens);
}

}  // namespace quire::cuda

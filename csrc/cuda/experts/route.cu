// Which experts each token goes to, and how much each counts: a warp a token.
//
// A lane keeps the experts lane, lane + 32, ... and is the only one that touches what is kept of them; what others need
// goes from lane to lane. Sums are a fixed tree over the lanes: a token's bits depend on its own logits alone.
#include <stdexcept>

#include "cuda/common/kernels.h"

namespace quire::cuda {
namespace {

constexpr float kNever = -INFINITY;

__device__ __forceinline__ int lane_of() { return static_cast<int>(threadIdx.x % kWarp); }

// The value that the lane has who keeps this number.
__device__ __forceinline__ float from_keeper(const float* values, int number) {
  const int keeper = number % kWarp;
  return __shfl_sync(kAllLanes, lane_of() == keeper ? values[number] : 0.0f, keeper);
}

// y = e^(x - shift) for all, and their sum.
__device__ __forceinline__ float exponentials(const float* x, float shift, float* y, int count) {
  float sum = 0;
  for (int i = lane_of(); i < count; i += kWarp) {
    y[i] = expf(x[i] - shift);
    sum += y[i];
  }
  return warp_sum(sum);
}

// In place. NaN is never the largest.
__device__ __forceinline__ void softmax(float* x, int count) {
  float most = kNever;
  for (int i = lane_of(); i < count; i += kWarp) most = x[i] > most ? x[i] : most;
  const float sum = exponentials(x, warp_max(most), x, count);
  for (int i = lane_of(); i < count; i += kWarp) x[i] /= sum;
}

__device__ __forceinline__ void sigmoids(float* x, int count) {
  for (int i = lane_of(); i < count; i += kWarp) x[i] = 1.0f / (1.0f + expf(-x[i]));
}

// The largest of those that are not out, the first of equals; there is one. NaN counts as -inf: whatever the order in
// which lanes compare, all find the same.
__device__ __forceinline__ int best_of(const float* keys, const uint8_t* out, int count) {
  float key = kNever;
  int best = count;
  const auto consider = [&](float other, int index) {
    if (index < count && (best == count || other > key || (other == key && index < best))) key = other, best = index;
  };
  for (int i = lane_of(); i < count; i += kWarp)
    if (!out[i]) consider(keys[i] == keys[i] ? keys[i] : kNever, i);
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(kAllLanes, key, step);
    consider(other, __shfl_xor_sync(kAllLanes, best, step));
  }
  return best;
}

// What is kept of a token: a number of each expert, each chosen one and each group.
struct Kept {
  float *scores, *keys, *chosen, *group_keys;
  uint8_t *out, *taken;

  __device__ Kept(const RouteArgs& args, char* memory) {
    scores = reinterpret_cast<float*>(memory);
    keys = scores + args.experts_count;
    chosen = keys + args.experts_count;
    group_keys = chosen + args.chosen;
    out = reinterpret_cast<uint8_t*>(group_keys + args.groups);
    taken = out + args.experts_count;
  }
  static size_t bytes(const RouteArgs& args) {
    return static_cast<size_t>(9 * args.experts_count + 4 * args.chosen + 5 * args.groups);
  }
};

// What a group of experts is chosen by: its largest key, or the sum of its two largest.
__device__ __forceinline__ float group_key(const float* keys, int size, int64_t best) {
  float first = kNever, second = kNever;
  for (int i = 0; i < size; ++i) {
    if (keys[i] > first) {
      second = first, first = keys[i];
    } else if (keys[i] > second) {
      second = keys[i];
    }
  }
  return best == 2 ? first + second : first;
}

// Mark the experts of all groups but the best as out.
__device__ __forceinline__ void keep_best_groups(const RouteArgs& args, const float* keys, const Kept& kept) {
  const int count = static_cast<int>(args.experts_count), groups = static_cast<int>(args.groups), size = count / groups;
  __syncwarp();  // all lanes' keys are there
  for (int g = lane_of(); g < groups; g += kWarp) {
    kept.group_keys[g] = group_key(keys + g * size, size, args.group_best);
    kept.taken[g] = 0;
  }
  for (int i = lane_of(); i < count; i += kWarp) kept.out[i] = 1;
  for (int64_t n = 0; n < args.top_groups; ++n) {
    const int group = best_of(kept.group_keys, kept.taken, groups);
    if (lane_of() == group % kWarp) kept.taken[group] = 1;
    for (int i = lane_of(); i < count; i += kWarp)
      if (i / size == group) kept.out[i] = 0;
  }
}

// PhiMoE's (arXiv:2409.12136): the best by its softmax over what lies near to it, then the best of the others.
__device__ __forceinline__ void mix_sparsely(const RouteArgs& args, const Kept& kept, int32_t* experts,
                                             float* weights) {
  const int count = static_cast<int>(args.experts_count);
  const float* logits = kept.scores;
  float* shares = kept.keys;
  for (int i = lane_of(); i < count; i += kWarp) kept.out[i] = 0;
  for (int64_t j = 0; j < args.chosen; ++j) {
    const int best = best_of(logits, kept.out, count);
    const float most = from_keeper(logits, best);
    for (int i = lane_of(); i < count; i += kWarp) {
      const float size = fabsf(logits[i]), factor = size > most ? size : most;
      shares[i] = kept.out[i] || (most - logits[i]) / factor > args.tolerance ? kNever : logits[i];
    }
    const float sum = exponentials(shares, most, shares, count), own = from_keeper(shares, best);
    if (lane_of() == 0) experts[j] = best, weights[j] = own / sum;
    if (lane_of() == best % kWarp) kept.out[best] = 1;
  }
}

__global__ void __launch_bounds__(kWarp) route_kernel(const RouteArgs args) {
  const int count = static_cast<int>(args.experts_count), chosen = static_cast<int>(args.chosen), lane = lane_of();
  const int64_t token = blockIdx.x;
  const float* logits = args.logits + token * args.logits_stride;
  int32_t* experts = args.experts + token * chosen;
  float* weights = args.weights + token * chosen;
  const Kept kept(args, dynamic_shared());
  for (int i = lane; i < count; i += kWarp) kept.scores[i] = logits[i];
  if (args.scores == Scores::sparse_mixer) return mix_sparsely(args, kept, experts, weights);
  if (args.scores == Scores::softmax) softmax(kept.scores, count);
  if (args.scores == Scores::sigmoid) sigmoids(kept.scores, count);
  const float* keys = kept.scores;
  if (args.bias) {
    for (int i = lane; i < count; i += kWarp) kept.keys[i] = kept.scores[i] + args.bias[i];
    keys = kept.keys;
  }
  if (args.groups > 1) {
    keep_best_groups(args, keys, kept);
  } else {
    for (int i = lane; i < count; i += kWarp) kept.out[i] = 0;
  }
  for (int j = 0; j < chosen; ++j) {
    const int best = best_of(keys, kept.out, count);
    const float score = from_keeper(kept.scores, best);
    if (lane == best % kWarp) kept.out[best] = 1;
    if (lane == j % kWarp) kept.chosen[j] = score;
    if (lane == 0) experts[j] = best;
  }
  if (args.scores == Scores::softmax_of_chosen) softmax(kept.chosen, chosen);
  if (args.scores == Scores::sigmoid_of_chosen) sigmoids(kept.chosen, chosen);
  float divisor = 1;
  if (args.renormalise) {
    float sum = 0;
    for (int j = 0; j < chosen; ++j) sum += from_keeper(kept.chosen, j);
    sum += args.added;
    divisor = sum > args.least ? sum : args.least;
  }
  for (int j = lane; j < chosen; j += kWarp) weights[j] = kept.chosen[j] / divisor * args.scale;
}

}  // namespace

void route(const RouteArgs& args, Stream stream) {
  const size_t bytes = Kept::bytes(args);
  if (bytes > kMostShared) throw std::invalid_argument("logits: too many experts for a GPU's shared memory");
  launch(route_kernel, dim3(static_cast<unsigned>(args.tokens)), dim3(kWarp), bytes, stream, args);
}

}  // namespace quire::cuda

// Which experts a token goes to, how much each counts, and the rows in the order of their experts.
//
// A token's sums run along its own experts in one fixed order, so that its bits depend on nothing else.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrainElements = 4096;  // about 5 microseconds on one core
constexpr float kNever = -__builtin_inff();

struct Chosen;  // whose memory says which experts are out
struct Groups;

inline int lanes_from(int64_t i, int64_t count) { return static_cast<int>(count - i < kLanes ? count - i : kLanes); }

// The largest number; NaN counts for nothing.
inline float largest(const float* x, int64_t count) {
  float most = kNever;
  for (int64_t i = 0; i < count; ++i) most = x[i] > most ? x[i] : most;
  return most;
}

// y = e^(x - shift) for all, and their sum.
inline float exponentials(const float* x, float shift, float* y, int64_t count) {
  Vec sum = zero();
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = lanes_from(i, count);
    const Vec e = exp(sub(load_first(x + i, n), set1(shift)));
    store_first(y + i, e, n);
    sum = add(sum, keep_first(e, n, zero()));
  }
  return reduce_add(sum);
}

inline void softmax(const float* x, float* y, int64_t count) {
  const float sum = exponentials(x, largest(x, count), y, count);
  for (int64_t i = 0; i < count; ++i) y[i] /= sum;
}

inline void sigmoids(const float* x, float* y, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const int n = lanes_from(i, count);
    store_first(y + i, sigmoid(load_first(x + i, n)), n);
  }
}

// The largest of those that are not out, the first of equals; there is one.
inline int32_t best_of(const float* keys, const uint8_t* out, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i)
    if (!out[i] && (best < 0 || keys[i] > keys[best])) best = i;
  return static_cast<int32_t>(best);
}

// What a group of experts is chosen by: its largest key, or the sum of its two largest.
inline float group_key(const float* keys, int64_t size, int64_t best) {
  float first = kNever, second = kNever;
  for (int64_t i = 0; i < size; ++i) {
    if (keys[i] > first)
      second = first, first = keys[i];
    else if (keys[i] > second)
      second = keys[i];
  }
  return best == 2 ? first + second : first;
}

// Mark the experts of all groups but the best as out.
void keep_best_groups(const RouteArgs& args, const float* keys, uint8_t* out) {
  const int64_t size = args.experts_count / args.groups;
  float* group_keys = scratch<float, Groups>(args.groups);
  uint8_t* taken = scratch<uint8_t, Groups>(args.groups);
  for (int64_t g = 0; g < args.groups; ++g) {
    group_keys[g] = group_key(keys + g * size, size, args.group_best);
    taken[g] = 0;
  }
  __builtin_memset(out, 1, args.experts_count);
  for (int64_t i = 0; i < args.top_groups; ++i) {
    const int32_t group = best_of(group_keys, taken, args.groups);
    taken[group] = 1;
    __builtin_memset(out + group * size, 0, size);
  }
}

// PhiMoE's (arXiv:2409.12136): the best by its softmax over what lies near to it, then the best of the others.
void mix_sparsely(const RouteArgs& args, const float* logits, float* shares, uint8_t* out, int32_t* experts,
                  float* weights) {
  const int64_t count = args.experts_count;
  __builtin_memset(out, 0, count);
  for (int64_t j = 0; j < args.chosen; ++j) {
    const int32_t best = best_of(logits, out, count);
    const float most = logits[best];
    for (int64_t i = 0; i < count; ++i) {
      const float size = __builtin_fabsf(logits[i]), factor = size > most ? size : most;
      shares[i] = out[i] || (most - logits[i]) / factor > args.tolerance ? kNever : logits[i];
    }
    const float sum = exponentials(shares, most, shares, count);
    experts[j] = best;
    weights[j] = shares[best] / sum;
    out[best] = 1;
  }
}

// scores, keys: memory for a number of each expert's; out: for a byte of each.
void route_token(const RouteArgs& args, const float* logits, float* scores, float* keys, uint8_t* out, int32_t* experts,
                 float* weights) {
  const int64_t count = args.experts_count, chosen = args.chosen;
  if (args.scores == Scores::sparse_mixer) return mix_sparsely(args, logits, scores, out, experts, weights);
  const float* values = scores;
  if (args.scores == Scores::softmax)
    softmax(logits, scores, count);
  else if (args.scores == Scores::sigmoid)
    sigmoids(logits, scores, count);
  else
    values = logits;
  const float* by = values;
  if (args.bias) {
    for (int64_t i = 0; i < count; ++i) keys[i] = values[i] + args.bias[i];
    by = keys;
  }
  if (args.groups > 1)
    keep_best_groups(args, by, out);
  else
    __builtin_memset(out, 0, count);
  for (int64_t j = 0; j < chosen; ++j) {
    experts[j] = best_of(by, out, count);
    weights[j] = values[experts[j]];
    out[experts[j]] = 1;
  }
  if (args.scores == Scores::softmax_of_chosen) softmax(weights, weights, chosen);
  if (args.scores == Scores::sigmoid_of_chosen) sigmoids(weights, weights, chosen);
  float divisor = 1.0f;
  if (args.renormalise) {
    float sum = 0.0f;
    for (int64_t j = 0; j < chosen; ++j) sum += weights[j];
    sum += args.added;
    divisor = sum > args.least ? sum : args.least;
  }
  for (int64_t j = 0; j < chosen; ++j) weights[j] = weights[j] / divisor * args.scale;
}

template <class T>
void combine_as(const CombineArgs& args) {
  parallel_for(
      args.tokens, 4 * kGrainElements / ((args.chosen + 1) * args.channels + 1), [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) {
          const int32_t* places = args.places + t * args.chosen;
          const float* weights = args.weights + t * args.chosen;
          const T* shared = args.shared ? static_cast<const T*>(args.shared) + t * args.shared_stride : nullptr;
          const Vec gate = args.shared_gate ? sigmoid(set1(args.shared_gate[t])) : set1(1.0f);
          T* y = static_cast<T*>(args.y) + t * args.channels;
          for (int64_t c = 0; c < args.channels; c += kLanes) {
            const int n = lanes_from(c, args.channels);
            Vec sum = zero();
            for (int64_t j = 0; j < args.chosen; ++j) {
              const T* row = static_cast<const T*>(args.x) + places[j] * args.x_stride + c;
              sum = fma(set1(weights[j]), load_first(row, n), sum);
            }
            if (shared) sum = add(sum, mul(gate, load_first(shared + c, n)));
            store_first(y + c, sum, n);
          }
        }
      });
}

}  // namespace

void route(const RouteArgs& args) {
  const int64_t count = args.experts_count;
  parallel_for(args.tokens, kGrainElements / ((args.chosen + 4) * count + 1), [&](int64_t begin, int64_t end) {
    float* scores = scratch<float, Chosen>(2 * count);
    uint8_t* out = scratch<uint8_t, Chosen>(count);
    for (int64_t t = begin; t < end; ++t)
      route_token(args, args.logits + t * args.logits_stride, scores, scores + count, out,
                  args.experts + t * args.chosen, args.weights + t * args.chosen);
  });
}

// A counting sort: rows of an expert stay in the order of their tokens.
void sort_by_expert(const SortByExpertArgs& args) {
  const int64_t pairs = args.num_tokens * args.chosen;
  int32_t* starts = args.starts;
  for (int64_t e = 0; e <= args.experts_count; ++e) starts[e] = 0;
  for (int64_t i = 0; i < pairs; ++i) ++starts[args.experts[i] + 1];
  for (int64_t e = 0; e < args.experts_count; ++e) starts[e + 1] += starts[e];
  int32_t* next = scratch<int32_t, Chosen>(args.experts_count);
  __builtin_memcpy(next, starts, args.experts_count * sizeof(int32_t));
  for (int64_t i = 0; i < pairs; ++i) {
    const int32_t place = next[args.experts[i]]++;
    args.tokens[place] = i / args.chosen;
    args.places[i] = place;
  }
}

void combine(const CombineArgs& args) {
  switch (args.dtype) {
    case DType::float32: return combine_as<float>(args);
    case DType::bfloat16: return combine_as<bf16>(args);
    case DType::float16: return combine_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

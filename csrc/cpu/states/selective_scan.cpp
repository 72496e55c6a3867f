// Mamba-2's recurrence, token by token in float: whatever the cut of a prompt into steps, a state has the same bits. Lanes
// are dimensions of a head, so that no sum goes across them; a head's state stays in the cache meanwhile.
#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/common/simd.h"
#include "cpu/states/past.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kGrain = 16384;  // updates of a state's numbers worth waking a thread for

template <class T>
inline float number(const void* numbers, int64_t i) {
  float value[1];
  store_first(value, load_first(static_cast<const T*>(numbers) + i, 1), 1);
  return value[0];
}

inline float exp1(float x) {
  float value[1];
  store_first(value, exp(set1(x)), 1);
  return value[0];
}

inline float softplus(float x) { return static_cast<float>(x > 20 ? x : __builtin_log1p(__builtin_exp(x))); }

struct Token {
  float dt, decay, d;
  const float *b, *c;  // [Z]
};

// Dimensions p .. p + 16 kVecs of a head (of the last sixteen, n): the state and the result of a token.
template <class T, int kVecs>
inline void update(const SelectiveScanArgs& args, const Token& token, const float* from, float* to, const T* x, T* y,
                   int n) {
  const Vec decay = set1(token.decay), dt = set1(token.dt);
  Vec inputs[kVecs], scaled[kVecs], sums[kVecs];
  const auto at = [&](const auto* p, int i) { return kVecs > 1 ? load(p + i * kLanes) : load_first(p, n); };
  for (int i = 0; i < kVecs; ++i) inputs[i] = at(x, i), scaled[i] = mul(dt, inputs[i]), sums[i] = zero();
  for (int64_t z = 0; z < args.state_size; ++z) {
    const Vec b = set1(token.b[z]), c = set1(token.c[z]);
    for (int i = 0; i < kVecs; ++i) {
      Vec h = mul(b, scaled[i]);
      if (from) h = fma(at(from + z * args.head_dim, i), decay, h);
      float* kept = to + z * args.head_dim + i * kLanes;
      if (kVecs > 1)
        store(kept, h);
      else
        store_first(kept, h, n);
      sums[i] = fma(c, h, sums[i]);
    }
  }
  for (int i = 0; i < kVecs; ++i) {
    const Vec sum = fma(set1(token.d), inputs[i], sums[i]);
    if (kVecs > 1)
      store(y + i * kLanes, sum);
    else
      store_first(y, sum, n);
  }
}

// All of a sequence's tokens in one head.
template <class T>
void scan_head(const SelectiveScanArgs& args, int64_t s, int64_t head) {
  const int64_t width = args.heads * args.head_dim, size = args.state_size * args.head_dim;
  const int64_t group = head / (args.heads / args.groups);
  const float a = -exp1(number<T>(args.a_log, head)), bias = number<T>(args.dt_bias, head);
  float* both = scratch<float, SelectiveScanArgs>(2 * args.state_size + 2 * kLanes);
  each_run(args.past, s, [&](int64_t first, int64_t end, int64_t from, int64_t to) {
    const float* before = from < 0 ? nullptr : args.states + (from * args.heads + head) * size;
    float* state = args.states + (to * args.heads + head) * size;
    for (int64_t t = first; t < end; ++t) {
      const T* x = static_cast<const T*>(args.x) + t * args.x_stride;
      Token token{0, 0, number<T>(args.d, head), both, both + args.state_size + kLanes};
      for (int64_t z = 0; z < args.state_size; z += kLanes) {
        const int n = static_cast<int>(args.state_size - z < kLanes ? args.state_size - z : kLanes);
        store_first(both + z, load_first(x + width + group * args.state_size + z, n), n);
        store_first(both + args.state_size + kLanes + z,
                    load_first(x + width + (args.groups + group) * args.state_size + z, n), n);
      }
      float dt = softplus(number<T>(args.dt, t * args.dt_stride + head) * args.dt_scale + bias);
      if (dt < args.dt_min) dt = args.dt_min;
      if (dt > args.dt_max) dt = args.dt_max;
      token.dt = dt, token.decay = exp1(dt * a);
      T* y = static_cast<T*>(args.y) + t * width + head * args.head_dim;
      x += head * args.head_dim;
      int64_t p = 0;
      for (; p + 4 * kLanes <= args.head_dim; p += 4 * kLanes)
        update<T, 4>(args, token, before ? before + p : nullptr, state + p, x + p, y + p, kLanes);
      for (; p < args.head_dim; p += kLanes) {
        const int n = static_cast<int>(args.head_dim - p < kLanes ? args.head_dim - p : kLanes);
        update<T, 1>(args, token, before ? before + p : nullptr, state + p, x + p, y + p, n);
      }
      before = state;
    }
  });
}

template <class T>
void selective_scan_as(const SelectiveScanArgs& args) {
  const int64_t tasks = args.past.sequences * args.heads;
  const int64_t tokens = tasks ? args.past.query_start[args.past.sequences] / args.past.sequences + 1 : 1;
  parallel_for(tasks, kGrain / (tokens * args.head_dim * args.state_size + 1), [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) scan_head<T>(args, task / args.heads, task % args.heads);
  });
  mark(args.past);
}

}  // namespace

void selective_scan(const SelectiveScanArgs& args) {
  switch (args.dtype) {
    case DType::float32: return selective_scan_as<float>(args);
    case DType::bfloat16: return selective_scan_as<bf16>(args);
    case DType::float16: return selective_scan_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

// The likeliest token of each row of logits: what a greedy draw is, and where every other one begins.
#include <math.h>

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/simd.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int64_t kBlock = 64 * kLanes;        // logits whose largest is looked for before its place is
constexpr int64_t kGrainElements = 64 * 1024;  // about 5 microseconds on one core, from its second-level cache

// One row with a number that is not finite, or that is too short for the other way.
int64_t search(const float* x, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (isnan(x[i])) return -1;
    if (x[i] > x[best]) best = i;
  }
  return n > 0 && isfinite(x[best]) ? best : -1;
}

int64_t likeliest_of(const float* x, int64_t n) {
  const int64_t whole = n / kBlock * kBlock;
  if (whole == 0) return search(x, n);
  Vec strange = zero();  // 0 times what is not finite is NaN
  float most = -INFINITY;
  int64_t block = 0;
  for (int64_t first = 0; first < whole; first += kBlock) {
    Vec a = load(x + first), b = load(x + first + kLanes);
    Vec c = load(x + first + 2 * kLanes), d = load(x + first + 3 * kLanes);
    strange = fma(add(add(a, b), add(c, d)), zero(), strange);
    for (int64_t i = first + 4 * kLanes; i < first + kBlock; i += 4 * kLanes) {
      const Vec e = load(x + i), f = load(x + i + kLanes), g = load(x + i + 2 * kLanes), h = load(x + i + 3 * kLanes);
      strange = fma(add(add(e, f), add(g, h)), zero(), strange);
      a = max(a, e), b = max(b, f), c = max(c, g), d = max(d, h);
    }
    const float peak = reduce_max(max(max(a, b), max(c, d)));
    if (peak > most) most = peak, block = first;
  }
  for (int64_t i = whole; i < n; ++i) {
    if (!isfinite(x[i])) return search(x, n);
    if (x[i] > most) most = x[i], block = whole;
  }
  if (reduce_add(strange) != 0) return search(x, n);
  while (x[block] != most) ++block;
  return block;
}

}  // namespace

void likeliest(const LikeliestArgs& args) {
  parallel_for(args.rows, kGrainElements / (args.columns + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      args.tokens[row] = likeliest_of(args.logits + row * args.columns, args.columns);
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

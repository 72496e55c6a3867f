// Carrying out a call of a linear kernel: which products it is made of, and what each thread does of it.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/linear/linear_amx.h"
#include "cpu/linear/linear_cut.h"
#include "cpu/linear/linear_dot.h"
#include "cpu/linear/linear_outer.h"
#include "cpu/linear/lora.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// A `Wrap` of products: they take weights as they lie.
template <class Products>
using AsTheyLie = Products;

template <class T, class Out, class Products>
void linear_by(const LinearArgs& args, const Products& products, Adapters<T, Out>& adapters) {
  const int64_t step = adapters.none() ? Products::kBlockRows : kLoraColumns;
  const int64_t rows = rows_of_block(args, rows_of(args), Products::kLongBlocks, products.row_bytes(), step);
  const Cut cut(args, rows, step, max_threads());
  const int64_t work = cut.total_rows * args.features * (args.tokens + kFetchWork) + adapters.work();
  const int64_t team = 1 + work / kThreadWork;
  const int64_t shrinks = adapters.shrink_items();  // these come first, since what follows waits for them
  parallel_for_ahead(shrinks + products.parts() * cut.blocks, team, [&](int64_t index, int64_t next_index) {
    if (index < shrinks) {
      const FlushDenormals<T> flush;
      return adapters.run_shrink(index);
    }
    const FlushDenormals<typename Products::Flushed> flush;
    Place place;
    const auto block = block_at<T, Out>(args, products, cut, index - shrinks, &place);
    if (next_index < 0) {
      products.run(block, nullptr);
    } else {
      const auto next = block_at<T, Out>(args, products, cut, next_index - shrinks);
      products.run(block, &next);
    }
    if (!adapters.none()) {
      const FlushDenormals<T> flush_all;
      adapters.run_expand(place.weight, place.row, block);
    }
  });
}

template <class T, class Out>
Adapters<T, Out> adapters_of(const LinearArgs& args, const Factors<T>& x) {
  Adapters<T, Out> adapters(args, x, scratch<Job, Adapters<T, Out>>(Adapters<T, Out>::most_jobs(args)));
  adapters.place(scratch<float, Adapters<T, Out>>(adapters.hidden()));
  return adapters;
}

// Wrap: how products come to their weights.
template <class T, class Out, template <class> class Wrap>
void linear_as(const LinearArgs& args) {
  if (args.tokens == 0 || args.count == 0) return;
#if defined(__AMX_BF16__)
  if constexpr (__is_same(T, bf16)) {
    Adapters<T, Out> adapters = adapters_of<T, Out>(args, Factors<T>(args));
    Wrap<MatrixProducts<Out>> products(args, scratch<bf16, MatrixProducts<Out>>(MatrixProducts<Out>::elements(args)));
    turn_tokens(products);
    return linear_by(args, products, adapters);
  }
#endif
  if constexpr (Dot<T>::kHasUnits) {
    using Outer = OuterProducts<T, Out>;
    if (Outer::suits(args)) {
      Adapters<T, Out> adapters = adapters_of<T, Out>(args, args.num_segments > 0 ? Factors<T>(args) : Factors<T>());
      Wrap<Outer> products(args, scratch<float, typename Outer::TurnedTokens>(Outer::elements(args)));
      turn_tokens(products);
      return linear_by(args, products, adapters);
    }
  }
  const Factors<T> x(args);
  Adapters<T, Out> adapters = adapters_of<T, Out>(args, x);
  linear_by(args, Wrap<DotProducts<T, Out>>(args, x), adapters);
}

template <class T, template <class> class Wrap>
void linear_of(const LinearArgs& args) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  if constexpr (__is_same(T, bf16))
    if (splits_pairs(args.tokens)) return linear_of<SplitPairs, Wrap>(args);
#endif
  if (args.out_dtype == DType::float32) return linear_as<T, float, Wrap>(args);
  linear_as<T, T, Wrap>(args);
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

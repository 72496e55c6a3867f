// Carrying out a call of a linear kernel: which products it is made of, and what each thread does of it.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/linear/linear_amx.h"
#include "cpu/linear/linear_columns.h"
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
void linear_by(const LinearArgs& args, const Products& products, const Adapters<T, Out>& adapters) {
  const int64_t step = Products::kBlockRows;
  const int64_t rows =
      rows_of_block(args, rows_of(args), Products::kLongBlocks, products.row_bytes(), step, products.tall_rows());
  const Cut cut(args, rows, step, max_threads());
  const int64_t work = cut.total_rows * args.features * (args.tokens + kFetchWork) + adapters.work();
  const int64_t shrinks = adapters.shrink_items(), before_expands = shrinks + products.parts() * cut.blocks;
  Progress progress;
  const auto run = [&](int64_t index, int64_t next_index) {
    if (index < shrinks) {
      const FlushDenormals<T> flush;
      adapters.run_shrink(index, next_index < shrinks ? next_index : -1);
    } else if (index < before_expands) {
      const FlushDenormals<typename Products::Flushed> flush;
      const auto block = block_at<T, Out>(args, products, cut, index - shrinks);
      if (next_index < 0 || next_index >= before_expands) {
        products.run(block, nullptr);
      } else {
        const auto next = block_at<T, Out>(args, products, cut, next_index - shrinks);
        products.run(block, &next);
      }
    } else {
      const FlushDenormals<T> flush;
      progress.wait_for(before_expands);
      return adapters.run_expand(index - before_expands);
    }
    if (!adapters.none()) progress.add();
  };
  parallel_for_ahead(before_expands + adapters.expand_items(), 1 + work / kThreadWork, run);
}

template <class T, class Out>
Adapters<T, Out> adapters_of(const LinearArgs& args, const Factors<T>& x) {
  Adapters<T, Out> adapters(args, x, scratch<Job, Adapters<T, Out>>(Adapters<T, Out>::most_jobs(args)));
  adapters.place(scratch<float, Adapters<T, Out>>(adapters.hidden()));
  return adapters;
}

// By products that turn all tokens first.
template <class T, class Out, class Products, template <class> class Wrap>
void linear_turned(const LinearArgs& args) {
  Adapters<T, Out> adapters = adapters_of<T, Out>(args, args.num_segments > 0 ? Factors<T>(args) : Factors<T>());
  Wrap<Products> products(args, scratch<float, typename Products::TurnedTokens>(Products::elements(args)));
  turn_tokens(products);
  linear_by(args, products, adapters);
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
#if defined(__AVX512F__)
  if constexpr (Dot<T>::kHasUnits && Dot<T>::kParts == 1) {
    if (ColumnProducts<T, Out>::suits(args)) return linear_turned<T, Out, ColumnProducts<T, Out>, Wrap>(args);
  }
#endif
  if constexpr (Dot<T>::kHasUnits) {
    if (OuterProducts<T, Out>::suits(args)) return linear_turned<T, Out, OuterProducts<T, Out>, Wrap>(args);
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

// What calls about experts share: each expert's rows are a call of the linear kernel, with the same bits, whatever else
// is in the call about all of them. All experts' blocks are one list, from which threads take: an expert's weights are
// read once for all its rows, and no thread waits between experts.
#pragma once

#include "cpu/common/kernels.h"
#include "cpu/common/parallel.h"
#include "cpu/common/scratch.h"
#include "cpu/linear/linear_amx.h"
#include "cpu/linear/linear_cut.h"
#include "cpu/linear/linear_dot.h"
#include "cpu/linear/linear_outer.h"
#include "cpu/linear/lora.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// What tokens take, turned, at a time: experts are done in so many turns that it stays about here.
constexpr int64_t kTurnedBytes = 32 << 20;

// The first of `count` ascending numbers that is not below `limit`.
inline int64_t first_from(const int64_t* numbers, int64_t count, int64_t limit) {
  int64_t begin = 0, end = count;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (numbers[middle] < limit)
      begin = middle + 1;
    else
      end = middle;
  }
  return begin;
}

// Write one expert's segments: of its rows, which are in the order of their tokens, those whose tokens a segment of the
// step names.
inline void own_segments(const GroupedLinearArgs& args, int64_t expert, LoraSegment* segments) {
  const int64_t first = args.starts[expert], rows = args.starts[expert + 1] - first;
  const int64_t* tokens = args.tokens + first;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    segments[s] = args.segments[s];
    segments[s].start = first_from(tokens, rows, segments[s].start);
    segments[s].end = first_from(tokens, rows, segments[s].end);
  }
}

// An expert's rows with `count` of its weights, of which the first, number `weight`, makes column `column` of `columns`:
// a call of the linear kernel.
inline LinearArgs call_of(const GroupedLinearArgs& args, int64_t expert, int64_t weight, int64_t count, int64_t column,
                          int64_t columns, const LoraSegment* segments) {
  const int64_t first = args.starts[expert], number = expert * args.count + weight;
  const int64_t element_bytes = args.dtype == DType::float32 ? 4 : 2;
  return {static_cast<const char*>(args.x) + first * args.x_stride * element_bytes,
          static_cast<char*>(args.y) + (first * columns + column) * element_bytes,
          args.weights + number,
          count,
          args.starts[expert + 1] - first,
          args.features,
          args.x_stride,
          args.dtype,
          args.dtype,
          args.num_segments > 0 ? args.tables + number : nullptr,
          segments,
          args.num_segments,
          args.formats ? args.formats + number : nullptr,
          columns};
}

// One expert's call, where what it needs lies, and the numbers of its items among those of all calls.
template <class T, class Products>
struct Group {
  using Element = T;
  using Flushed = typename Products::Flushed;
  const LinearArgs args;
  Adapters<T, T> adapters;
  const Products products;
  const Cut cut;
  int64_t first_shrink, first_tile, first_block, first_expand;

  template <class Make>
  Group(const LinearArgs& call, const Factors<T>& x, Job* jobs, int64_t total_rows, int64_t tail_blocks,
        const Make& make)
      : args(call), adapters(args, x, jobs), products(make(args)),
        cut(args,
            rows_of_block(args, total_rows, Products::kLongBlocks, products.row_bytes(), Products::kBlockRows,
                          products.tall_rows()),
            Products::kBlockRows, tail_blocks),
        first_shrink(0), first_tile(0), first_block(0), first_expand(0) {}

  int64_t blocks() const { return products.parts() * cut.blocks; }
  int64_t work() const { return cut.total_rows * args.features * (args.tokens + kFetchWork) + adapters.work(); }
  auto block(int64_t index) const { return block_at<T, T>(args, products, cut, index - first_block); }
  static void* operator new(__SIZE_TYPE__, void* memory) { return memory; }
};

// The group of an item, by the numbers kFirst of all groups' first items.
template <auto kFirst, class G>
G& group_of(G* groups, int64_t count, int64_t item) {
  int64_t begin = 0, end = count;
  while (end - begin > 1) {
    const int64_t middle = (begin + end) / 2;
    if (groups[middle].*kFirst <= item)
      begin = middle;
    else
      end = middle;
  }
  return groups[begin];
}

template <class G>
void run_groups(G* groups, int64_t count) {
  int64_t shrinks = 0, tiles = 0, blocks = 0, expands = 0, work = 0;
  for (G* group = groups; group < groups + count; ++group) {
    group->first_shrink = shrinks, group->first_tile = tiles, group->first_block = blocks;
    group->first_expand = expands;
    shrinks += group->adapters.shrink_items();
    tiles += group->products.tiles();
    blocks += group->blocks();
    expands += group->adapters.expand_items();
    work += group->work();
  }
  parallel_for(tiles, decltype(groups->products)::kTurnGrain, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const G& group = group_of<&G::first_tile>(groups, count, begin);
      const int64_t last = group.first_tile + group.products.tiles();
      group.products.turn(begin - group.first_tile, (end < last ? end : last) - group.first_tile);
      begin = last;
    }
  });
  const int64_t before_expands = shrinks + blocks;
  Progress progress;
  parallel_for_ahead(before_expands + expands, 1 + work / kThreadWork, [&](int64_t index, int64_t next_index) {
    if (index < shrinks) {
      const FlushDenormals<typename G::Element> flush;
      const G& group = group_of<&G::first_shrink>(groups, count, index);
      const int64_t own = index - group.first_shrink, next = next_index - group.first_shrink;
      group.adapters.run_shrink(own, next_index >= 0 && next < group.adapters.shrink_items() ? next : -1);
    } else if (index < before_expands) {
      const FlushDenormals<typename G::Flushed> flush;
      const G& group = group_of<&G::first_block>(groups, count, index - shrinks);
      const auto block = group.block(index - shrinks);
      if (next_index < 0 || next_index >= before_expands) {
        group.products.run(block, nullptr);
      } else {
        const auto next = group_of<&G::first_block>(groups, count, next_index - shrinks).block(next_index - shrinks);
        group.products.run(block, &next);
      }
    } else {
      const FlushDenormals<typename G::Element> flush;
      progress.wait_for(before_expands);
      const G& group = group_of<&G::first_expand>(groups, count, index - before_expands);
      return group.adapters.run_expand(index - before_expands - group.first_expand);
    }
    if (expands > 0) progress.add();
  });
}

// The products of several experts' calls. make: of a call and memory for `elements(call)` turned elements, Products.
template <class T, class Products, class Turned, class Elements, class Make>
void run_calls(const LinearArgs* const* calls, int64_t count, const LinearArgs* first, const Factors<T>* factors,
               const Elements& elements, const Make& make) {
  using G = Group<T, Products>;
  G* groups = reinterpret_cast<G*>(scratch<char, G>(count * static_cast<int64_t>(sizeof(G))));
  for (int64_t done = 0; done < count;) {
    int64_t end = done, turned = 0, jobs = 0, rows = 0;
    for (; end < count; ++end) {
      const LinearArgs& call = *calls[end];
      if (end > done && (turned + elements(call)) * static_cast<int64_t>(sizeof(Turned)) > kTurnedBytes) break;
      turned += elements(call);
      jobs += Adapters<T, T>::most_jobs(call);
      rows += rows_of(call);
    }
    Turned* memory = scratch<Turned, Make>(turned);
    Job* job = scratch<Job, G>(jobs);
    int64_t hidden = 0;
    for (int64_t i = done; i < end; ++i) {
      const LinearArgs& call = *calls[i];
      const Factors<T>& x = factors[calls[i] - first];
      G* group = new (groups + i - done) G(call, x, job, rows, i + 1 == end ? max_threads() : 0,
                                           [&](const LinearArgs& own) { return make(own, x, memory); });
      memory += elements(call);
      job += Adapters<T, T>::most_jobs(call);
      hidden += group->adapters.hidden();
    }
    float* h = scratch<float, G>(hidden);
    for (G* group = groups; group < groups + (end - done); ++group) {
      group->adapters.place(h);
      h += group->adapters.hidden();
    }
    run_groups(groups, end - done);
    done = end;
  }
}

// The calls of all experts that have rows, and x as they multiply it.
template <class T>
struct Calls {
  const GroupedLinearArgs& args;
  LinearArgs* calls;
  Factors<T>* factors;
  const LinearArgs** some;  // room for as many
  int64_t count = 0;

  // takes: of an expert and a weight's number, whether the weight belongs here; neighbours go together.
  template <class Takes>
  Calls(const GroupedLinearArgs& call, const Takes& takes)
      : args(call), calls(scratch<LinearArgs, Calls>(args.experts * args.count)),
        factors(scratch<Factors<T>, Calls>(args.experts * args.count)),
        some(scratch<const LinearArgs*, Calls>(args.experts * args.count)) {
    LoraSegment* segments = scratch<LoraSegment, Calls>(args.experts * args.num_segments);
    int64_t columns = 0;
    for (int64_t i = 0; i < args.count; ++i) columns += args.weights[i].rows;
    for (int64_t e = 0; e < args.experts; ++e, segments += args.num_segments) {
      if (args.starts[e] == args.starts[e + 1]) continue;
      own_segments(args, e, segments);
      for (int64_t i = 0, end = 0, column = 0; i < args.count; i = end) {
        const bool taken = takes(e, i);
        int64_t width = 0;
        for (end = i; end < args.count && takes(e, end) == taken; ++end) width += args.weights[end].rows;
        if (taken) calls[count++] = call_of(args, e, i, end - i, column, columns, segments);
        column += width;
      }
    }
    for (int64_t i = 0; i < count; ++i) factors[i] = Factors<T>();
  }

  // Those for which `wanted` holds, into `some`.
  template <class Wanted>
  int64_t choose(const Wanted& wanted) const {
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; ++i)
      if (wanted(calls[i])) some[chosen++] = calls + i;
    return chosen;
  }

  // Widen x, which is all rows, where the processor cannot multiply it as it is.
  void widen() {
    LinearArgs all = calls[0];
    all.x = args.x, all.tokens = args.rows;
    const Factors<T> x(all);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t offset = static_cast<const T*>(calls[i].x) - static_cast<const T*>(args.x);
      factors[i] = x.from(args.x_stride > 0 ? offset / args.x_stride : 0);
    }
  }
};

// Products of floats. Wrap: as in linear_run.h.
template <class T, template <class> class Wrap, class Takes>
void grouped_linear_as(const GroupedLinearArgs& args, const Takes& takes) {
  Calls<T> calls(args, takes);
  if (calls.count == 0) return;
  const auto none = [](const LinearArgs&) { return int64_t{0}; };
#if defined(__AMX_BF16__)
  if constexpr (__is_same(T, bf16)) {
    using Matrix = MatrixProducts<T>;
    if (args.num_segments > 0) calls.widen();
    return run_calls<T, Wrap<Matrix>, bf16>(
        calls.some, calls.choose([](const LinearArgs&) { return true; }), calls.calls, calls.factors, Matrix::elements,
        [](const LinearArgs& call, const Factors<T>&, bf16* memory) { return Wrap<Matrix>(call, memory); });
  }
#endif
  const auto suits = [](const LinearArgs& call) {
    if constexpr (Dot<T>::kHasUnits) return OuterProducts<T, T>::suits(call);
    return false;
  };
  const int64_t few = calls.choose([&](const LinearArgs& call) { return !suits(call); });
  if (few > 0 || args.num_segments > 0) calls.widen();
  if (few > 0)
    run_calls<T, Wrap<DotProducts<T, T>>, float>(
        calls.some, few, calls.calls, calls.factors, none,
        [](const LinearArgs& call, const Factors<T>& x, float*) { return Wrap<DotProducts<T, T>>(call, x); });
  if constexpr (Dot<T>::kHasUnits) {
    using Outer = OuterProducts<T, T>;
    run_calls<T, Wrap<Outer>, float>(
        calls.some, calls.choose(suits), calls.calls, calls.factors, Outer::elements,
        [](const LinearArgs& call, const Factors<T>&, float* memory) { return Wrap<Outer>(call, memory); });
  }
}

template <template <class> class Wrap, class Takes>
void grouped_linear_of(const GroupedLinearArgs& args, const Takes& takes) {
  switch (args.dtype) {
    case DType::float32: return grouped_linear_as<float, Wrap>(args, takes);
    case DType::float16: return grouped_linear_as<fp16, Wrap>(args, takes);
    case DType::bfloat16: break;
  }
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  int64_t experts = 0;
  for (int64_t e = 0; e < args.experts; ++e) experts += args.starts[e] < args.starts[e + 1];
  if (splits_pairs(args.rows / experts)) return grouped_linear_as<SplitPairs, Wrap>(args, takes);
#endif
  grouped_linear_as<bf16, Wrap>(args, takes);
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

// y = x W^T + b where each row of x has the weights of its own expert; rows come sorted by expert.
//
// The products are the linear kernel's: an expert's rows are one of its calls, so that each element has that kernel's
// bits whatever else is in the call. All experts' blocks are one list, from which threads take: an expert's weights are
// read once for all its rows, and no thread waits between experts.
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

// One expert's rows as a call of the linear kernel. Its segments are written to `segments`: of its rows, which are in
// the order of their tokens, those whose tokens a segment of the step names.
inline LinearArgs call_of(const GroupedLinearArgs& args, int64_t expert, int64_t element_bytes, int64_t columns,
                          LoraSegment* segments) {
  const int64_t first = args.starts[expert], rows = args.starts[expert + 1] - first;
  for (int64_t s = 0; s < args.num_segments; ++s) {
    LoraSegment own = args.segments[s];
    const int64_t* tokens = args.tokens + first;
    own.start = first_from(tokens, rows, own.start);
    own.end = first_from(tokens, rows, own.end);
    segments[s] = own;
  }
  return {static_cast<const char*>(args.x) + first * args.x_stride * element_bytes,
          static_cast<char*>(args.y) + first * columns * element_bytes,
          args.weights + expert * args.count,
          args.count,
          rows,
          args.features,
          args.x_stride,
          args.dtype,
          args.dtype,
          args.num_segments > 0 ? args.tables + expert * args.count : nullptr,
          segments,
          args.num_segments};
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
  int64_t first_shrink, first_tile, first_block;

  template <class Make>
  Group(const LinearArgs& call, const Factors<T>& x, Job* jobs, int64_t total_rows, int64_t tail_blocks,
        const Make& make)
      : args(call), adapters(args, x, jobs), products(make(args)),
        cut(args, rows_of_block(args, total_rows, Products::kLongBlocks, products.row_bytes(), step()), step(),
            tail_blocks),
        first_shrink(0), first_tile(0), first_block(0) {}

  int64_t step() const { return adapters.none() ? Products::kBlockRows : kLoraColumns; }
  int64_t blocks() const { return products.parts() * cut.blocks; }
  int64_t work() const { return cut.total_rows * args.features * (args.tokens + kFetchWork) + adapters.work(); }
  auto block(int64_t index, Place* place = nullptr) const {
    return block_at<T, T>(args, products, cut, index - first_block, place);
  }
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
  int64_t shrinks = 0, tiles = 0, blocks = 0, work = 0;
  for (G* group = groups; group < groups + count; ++group) {
    group->first_shrink = shrinks, group->first_tile = tiles, group->first_block = blocks;
    shrinks += group->adapters.shrink_items();
    tiles += group->products.tiles();
    blocks += group->blocks();
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
  parallel_for_ahead(shrinks + blocks, 1 + work / kThreadWork, [&](int64_t index, int64_t next_index) {
    if (index < shrinks) {
      const FlushDenormals<typename G::Element> flush;
      G& group = group_of<&G::first_shrink>(groups, count, index);
      return group.adapters.run_shrink(index - group.first_shrink);
    }
    const FlushDenormals<typename G::Flushed> flush;
    const G& group = group_of<&G::first_block>(groups, count, index - shrinks);
    Place place;
    const auto block = group.block(index - shrinks, &place);
    if (next_index < 0) {
      group.products.run(block, nullptr);
    } else {
      const auto next = group_of<&G::first_block>(groups, count, next_index - shrinks).block(next_index - shrinks);
      group.products.run(block, &next);
    }
    if (!group.adapters.none()) {
      const FlushDenormals<typename G::Element> flush_all;
      group.adapters.run_expand(place.weight, place.row, block);
    }
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
  LinearArgs* calls;
  Factors<T>* factors;
  const LinearArgs** some;  // room for as many
  int64_t count = 0;

  explicit Calls(const GroupedLinearArgs& args)
      : calls(scratch<LinearArgs, Calls>(args.experts)), factors(scratch<Factors<T>, Calls>(args.experts)),
        some(scratch<const LinearArgs*, Calls>(args.experts)) {
    LoraSegment* segments = scratch<LoraSegment, Calls>(args.experts * args.num_segments);
    int64_t columns = 0;
    for (int64_t i = 0; i < args.count; ++i) columns += args.weights[i].rows;
    for (int64_t e = 0; e < args.experts; ++e)
      if (args.starts[e] < args.starts[e + 1])
        calls[count++] = call_of(args, e, sizeof(T), columns, segments + e * args.num_segments);
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
  void widen(const GroupedLinearArgs& args) {
    LinearArgs all = calls[0];
    all.x = args.x, all.tokens = args.rows;
    const Factors<T> x(all);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t offset = static_cast<const T*>(calls[i].x) - static_cast<const T*>(args.x);
      factors[i] = x.from(args.x_stride > 0 ? offset / args.x_stride : 0);
    }
  }
};

template <class T>
void grouped_linear_as(const GroupedLinearArgs& args) {
  Calls<T> calls(args);
  const auto none = [](const LinearArgs&) { return int64_t{0}; };
  for (int64_t i = 0; i < calls.count; ++i) calls.factors[i] = Factors<T>();
#if defined(__AMX_BF16__)
  if constexpr (__is_same(T, bf16)) {
    using Matrix = MatrixProducts<T>;
    if (args.num_segments > 0) calls.widen(args);
    return run_calls<T, Matrix, bf16>(
        calls.some, calls.choose([](const LinearArgs&) { return true; }), calls.calls, calls.factors, Matrix::elements,
        [](const LinearArgs& call, const Factors<T>&, bf16* memory) { return Matrix(call, memory); });
  }
#endif
  const auto suits = [](const LinearArgs& call) {
    if constexpr (Dot<T>::kHasUnits) return OuterProducts<T, T>::suits(call);
    return false;
  };
  const int64_t few = calls.choose([&](const LinearArgs& call) { return !suits(call); });
  if (few > 0 || args.num_segments > 0) calls.widen(args);
  if (few > 0)
    run_calls<T, DotProducts<T, T>, float>(
        calls.some, few, calls.calls, calls.factors, none,
        [](const LinearArgs& call, const Factors<T>& x, float*) { return DotProducts<T, T>(call, x); });
  if constexpr (Dot<T>::kHasUnits) {
    using Outer = OuterProducts<T, T>;
    run_calls<T, Outer, float>(
        calls.some, calls.choose(suits), calls.calls, calls.factors, Outer::elements,
        [](const LinearArgs& call, const Factors<T>&, float* memory) { return Outer(call, memory); });
  }
}

void grouped_linear_of_bf16(const GroupedLinearArgs& args) {
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
  int64_t experts = 0;
  for (int64_t e = 0; e < args.experts; ++e) experts += args.starts[e] < args.starts[e + 1];
  if (splits_pairs(args.rows / experts)) return grouped_linear_as<SplitPairs>(args);
#endif
  grouped_linear_as<bf16>(args);
}

}  // namespace

void grouped_linear(const GroupedLinearArgs& args) {
  if (args.rows == 0 || args.count == 0) return;
  switch (args.dtype) {
    case DType::float32: return grouped_linear_as<float>(args);
    case DType::bfloat16: return grouped_linear_of_bf16(args);
    case DType::float16: return grouped_linear_as<fp16>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

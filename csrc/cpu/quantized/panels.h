// The products of integer_products.h for many tokens, with the very sums.
//
// kPanelRows rows of a weight, a panel, are made ready in the thread's own memory, with kSideRows rows side by side: four
// codes of each in a register, times four codes of a token in all lanes, go to a sum for each row. A tile of tokens passes
// a panel four times, for a chain each, so that a side of a token needs two registers: the sum in the group and the chain.
#pragma once

#include "cpu/quantized/panel_rows_avx2.h"
#include "cpu/quantized/panel_rows_avx512.h"

#if defined(QUIRE_WIDE)

namespace quire {
namespace QUIRE_ISA {
namespace {

// A group of a tile's tokens.
struct TileGroup {
  int codes[8][kPanelTokens];  // four columns each
  float scales[kPanelTokens], scaled_sums[kPanelTokens];
  int sums[kPanelTokens], first_sums[kPanelTokens];
  int16_t pairs[kPanelTokens][2];  // the sums of both halves
  int tokens_with_rest;            // a bit for each token that has second codes here

  void put(int64_t token, const GroupCodes& from) {
    from.store(reinterpret_cast<int8_t*>(&codes[0][token]), sizeof codes[0], sizeof codes / 2);
    scales[token] = from.scale, scaled_sums[token] = from.scale * static_cast<float>(from.sum);
    sums[token] = from.sum, first_sums[token] = from.first_sum;
    pairs[token][0] = static_cast<int16_t>(from.first_sum);
    pairs[token][1] = static_cast<int16_t>(from.sum - from.first_sum);
  }
};
// Of a tile, or of a chain of it. rest: the second codes, of the tokens that have them there; of others, whatever there
// was. They lie apart, since few groups have any.
struct TileGroups {
  TileGroup *own, *rest;
  TileGroups from(int64_t group) const { return {own + group, rest + group}; }
};

// What the sums of a group's two halves begin with: they take the offset of unsigned codes off.
struct TileStart {
  int first[kPanelTokens], second[kPanelTokens];

  // kHalves: each half has a sum of its own.
  void set(const TileGroup& group, int offset, bool halves) {
    const __m256i factor = _mm256_set1_epi32(-offset);
    const auto numbers = [](const int* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    // Eight at a time: what is put past a place's end is overwritten by what belongs there.
    const auto put = [&](int* to, __m256i sums) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_mullo_epi32(sums, factor));
    };
    const __m256i all = numbers(group.sums), of_first = halves ? numbers(group.first_sums) : all;
    put(first, of_first);
    if (halves) put(second, _mm256_sub_epi32(all, of_first));
  }
};

struct TileStarts {
  TileStart own, rest;  // rest: where tokens have second codes
};

// A call's tokens in tiles of about the same size, [tiles][kChains][steps].
class PanelTiles {
 public:
  explicit PanelTiles(const LinearArgs& args)
      : args_(args), tiles_((args.tokens + kPanelTokens - 1) / kPanelTokens),
        steps_((args.features + kStep - 1) / kStep),
        memory_(scratch<TileGroup, PanelTiles>(2 * tiles_ * tile_groups())) {}

  int64_t count() const { return tiles_; }
  int64_t steps() const { return steps_; }
  int64_t first_of(int64_t tile) const { return args_.tokens * tile / tiles_; }
  TileGroups operator[](int64_t tile) const {
    TileGroup* own = memory_ + tile * tile_groups();
    return {own, own + tiles_ * tile_groups()};
  }

  template <class T>
  void quantize_tile(int64_t tile) const {
    const int64_t first = first_of(tile), count = first_of(tile + 1) - first;
    for (int64_t i = 0; i < count; ++i) {
      const T* x = static_cast<const T*>(args_.x) + (first + i) * args_.x_stride;
      const float outlier = outlier_square(x, args_.features);
      for (int64_t g = 0; g < kChains * steps_; ++g) {
        const TileGroups to = (*this)[tile].from(g % kChains * steps_ + g / kChains);
        const GroupSteps group(g * kGroup < args_.features ? x + g * kGroup : nullptr, outlier);
        if (i == 0) to.own->tokens_with_rest = 0;
        to.own->put(i, group.own());
        if (!group.outliers) continue;
        to.own->tokens_with_rest |= 1 << i;
        to.rest->put(i, group.rest());
      }
    }
  }

  void start(int64_t tile, int offset, bool halves, TileStarts* starts) const {
    const TileGroups groups = (*this)[tile];
    for (int64_t g = 0; g < tile_groups(); ++g) {
      starts[g].own.set(groups.own[g], offset, halves);
      if (groups.own[g].tokens_with_rest) starts[g].rest.set(groups.rest[g], offset, halves);
    }
  }
  int64_t tile_groups() const { return kChains * steps_; }

 private:
  const LinearArgs& args_;
  const int64_t tiles_, steps_;
  TileGroup* const memory_;  // all tiles' own, then all their rests
};

// The bytes that come next, fetched by and by.
struct BytesAhead {
  const uint8_t *at, *end;
  int64_t lines;  // at a time

  void fetch() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// What a side's sums have in common: the group's codes times those of some tokens.
template <class Form, int kFrom, int kCount>
inline __attribute__((always_inline)) void add_scaled(const PanelGroup<Form::kHalves>& w, const TileGroup& x,
                                                      const WideInts (*sums)[kSides], WideFloats (*acc)[kSides]) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const WideFloats scale = all_lanes(x.scales[kFrom + i]);
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      WideFloats& own = acc[kFrom + i][side];
      own = fma(to_floats(sums[i][side]), mul(w.scale[side], scale), own);
      if constexpr (Form::kMinimum && Form::kHalves) {
        const WideInts low = mul_pairs(all_lanes(read<int>(x.pairs[kFrom + i])), w.low[side]);
        own = fma(to_floats(low), mul(w.minimum[side], scale), own);
      } else if constexpr (Form::kMinimum) {
        own = fma(w.minimum[side], all_lanes(x.scaled_sums[kFrom + i]), own);
      }
    }
  }
}

template <class Form, int kFrom, int kCount>
inline __attribute__((always_inline)) void add_some(const PanelGroup<Form::kHalves>& w, const TileGroup& x,
                                                    const TileStart& start, WideFloats (*acc)[kSides]) {
  WideInts sums[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sums[i][0] = sums[i][1] = all_lanes(start.first[kFrom + i]);
  if constexpr (Form::kHalves) {
    WideInts second[kCount][kSides];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) second[i][0] = second[i][1] = all_lanes(start.second[kFrom + i]);
    add_quads<Form, 0, 4, kCount>(w.codes, &x.codes[0][kFrom], sums);
    add_quads<Form, 4, 4, kCount>(w.codes, &x.codes[0][kFrom], second);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[i][side] = add(mul(sums[i][side], w.factors[side][0]), mul(second[i][side], w.factors[side][1]));
  } else {
    add_quads<Form, 0, 8, kCount>(w.codes, &x.codes[0][kFrom], sums);
  }
  add_scaled<Form, kFrom, kCount>(w, x, sums, acc);
}

// The second codes of the tokens that have them, a bit for each.
template <class Form, int kFrom, int kCount>
inline __attribute__((always_inline)) void add_rest(const PanelGroup<Form::kHalves>& w, const TileGroup& x,
                                                    const TileStart& start, int tokens, WideFloats (*acc)[kSides]) {
  WideFloats with[kFrom + kCount][kSides];
#pragma GCC unroll 16
  for (int i = kFrom; i < kFrom + kCount; ++i) with[i][0] = acc[i][0], with[i][1] = acc[i][1];
  add_some<Form, kFrom, kCount>(w, x, start, with);
#pragma GCC unroll 16
  for (int i = kFrom; i < kFrom + kCount; ++i)
    if (tokens >> i & 1) acc[i][0] = with[i][0], acc[i][1] = with[i][1];
}

// One chain of a tile's tokens with a panel's rows.
template <class Form, int kCount>
void multiply_chain(const PanelGroup<Form::kHalves>* w, TileGroups x, const TileStarts* starts, int64_t steps,
                    BytesAhead* ahead, WideFloats (*chain)[kSides]) {
  // With two sums a row and token, half of the tokens are enough for the registers.
  constexpr int kFirst = Form::kHalves || kSignedBytes ? (kCount + 1) / 2 : kCount;
  WideFloats acc[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) acc[i][0] = acc[i][1] = WideFloats{};
  for (int64_t s = 0; s < steps; ++s) {
    ahead->fetch();
    add_some<Form, 0, kFirst>(w[s], x.own[s], starts[s].own, acc);
    if constexpr (kFirst < kCount) add_some<Form, kFirst, kCount - kFirst>(w[s], x.own[s], starts[s].own, acc);
    const int tokens = x.own[s].tokens_with_rest;
    if (__builtin_expect(tokens != 0, 0)) {
      add_rest<Form, 0, kFirst>(w[s], x.rest[s], starts[s].rest, tokens, acc);
      if constexpr (kFirst < kCount)
        add_rest<Form, kFirst, kCount - kFirst>(w[s], x.rest[s], starts[s].rest, tokens, acc);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) chain[i][0] = acc[i][0], chain[i][1] = acc[i][1];
}

template <class Form, int kCount = kPanelTokens>
inline void multiply_some_chains(int64_t count, const PanelGroup<Form::kHalves>* w, TileGroups x,
                                 const TileStarts* starts, int64_t steps, BytesAhead* ahead,
                                 WideFloats (*chain)[kSides]) {
  if (count == kCount) return multiply_chain<Form, kCount>(w, x, starts, steps, ahead, chain);
  if constexpr (kCount > 1) multiply_some_chains<Form, kCount - 1>(count, w, x, starts, steps, ahead, chain);
}

template <class T, class Out>
class PanelProducts {
 public:
  using Stored = uint8_t;
  using Flushed = float;
  static constexpr int kBlockRows = kPanelRows;
  static constexpr bool kLongBlocks = false;
  static constexpr int64_t kTurnGrain = 1;
  using Block = LinearBlock<T, Out, uint8_t>;

  explicit PanelProducts(const LinearArgs& args) : args_(args), x_(args) {}

  // Half of a panel's bytes where panels are small: all tokens pass each block.
  int64_t row_bytes() const { return args_.features * (QUIRE_WIDE == 64 ? 5 : 2) / 4; }
  int64_t tiles() const { return x_.count(); }
  void turn(int64_t begin, int64_t end) const {
    for (int64_t tile = begin; tile < end; ++tile) x_.template quantize_tile<T>(tile);
  }
  int64_t parts() const { return 1; }
  int64_t first_of(int64_t part) const { return part * args_.tokens; }

  void run(const Block& block, const Block* next) const {
    for_kind(args_.formats[block.weight].kind, [&](auto kind) { multiply<decltype(kind)>(block, next); });
  }

 private:
  template <class Kind>
  void multiply(const Block& block, const Block* next) const {
    using Group = typename Panel<Kind>::Group;
    const int64_t panels = (block.rows + kPanelRows - 1) / kPanelRows, size = x_.tile_groups();
    Group* groups = scratch<Group, Group>(panels * size);
    for (int64_t p = 0; p < panels; ++p) take(block, p, Panel<Kind>(groups + p * size, x_.steps()));
    TileStarts* starts = scratch<TileStarts, TileStarts>(size + 1);
    BytesAhead ahead = {nullptr, nullptr, 0};
    if (next) {
      const int64_t bytes = next->rows * args_.formats[next->weight].row_bytes;
      ahead = {next->w, next->w + bytes, bytes / (64 * panels * size * x_.count()) + 1};
    }
    for (int64_t t = 0; t < x_.count(); ++t) {
      x_.start(t, Steps<Kind>::kOffset, Kind::kHalves, starts);
      for (int64_t p = 0; p < panels; ++p)
        multiply_tile(block, t, p, Panel<Kind>(groups + p * size, x_.steps()), starts, &ahead);
    }
  }

  template <class Kind>
  void take(const Block& block, int64_t number, const Panel<Kind>& panel) const {
    const int64_t row_bytes = args_.formats[block.weight].row_bytes;
    panel.take(block.w + number * kPanelRows * row_bytes, row_bytes, block.rows - number * kPanelRows, args_.features);
  }

  template <class Kind>
  void multiply_tile(const Block& block, int64_t tile, int64_t number, const Panel<Kind>& panel,
                     const TileStarts* starts, BytesAhead* ahead) const {
    const int64_t first = x_.first_of(tile), count = x_.first_of(tile + 1) - first, steps = x_.steps();
    WideFloats chains[kChains][kPanelTokens][kSides];
    for (int64_t c = 0; c < kChains; ++c)
      multiply_some_chains<typename Panel<Kind>::Form>(count, panel.chain(c), x_[tile].from(c * steps),
                                                       starts + c * steps, steps, ahead, chains[c]);
    for (int64_t row = number * kPanelRows, at = 0; at < kPanelRows / kLanes; row += kLanes, ++at) {
      const int64_t left = block.rows - row;
      if (left <= 0) return;
      const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + row, block.y_stride,
                                      static_cast<int>(left < kLanes ? left : kLanes)};
      for (int64_t i = 0; i < count; ++i) {
        const auto both = [&](int side) {
          return add(add(chains[0][i][side], chains[1][i][side]), add(chains[2][i][side], chains[3][i][side]));
        };
        result.put(first + i, sixteen(both, at));
      }
    }
  }

  const LinearArgs& args_;
  const PanelTiles x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

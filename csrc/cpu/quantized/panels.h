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

// What the sums of a group's two halves begin with: they take the offset of unsigned codes off. Of eight tokens at a
// time, whether there are as many or not.
struct TileStart {
  int first[8], second[8];

  // kHalves: each half has a sum of its own.
  template <class Kind>
  void set(const TileGroup& group) {
    const __m256i factor = _mm256_set1_epi32(-Steps<Kind>::kOffset);
    const auto numbers = [](const int* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); };
    const auto put = [&](int* to, __m256i sums) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_mullo_epi32(sums, factor));
    };
    const __m256i all = numbers(group.sums), of_first = Kind::kHalves ? numbers(group.first_sums) : all;
    put(first, of_first);
    if (Kind::kHalves) put(second, _mm256_sub_epi32(all, of_first));
  }
};
// As TileGroups.
struct TileStarts {
  TileStart *own, *rest;
  TileStarts from(int64_t group) const { return {own + group, rest + group}; }
};

// A call's tokens in tiles of about the same size: groups [tiles][kChains][steps], first all own codes, then all rests;
// what sums begin with, the same for each kind of the call's weights; and for each tile the tokens that have rests.
class PanelTiles {
  static constexpr int kMostKinds = 16;

 public:
  explicit PanelTiles(const LinearArgs& args)
      : args_(args), tiles_((args.tokens + kPanelTokens - 1) / kPanelTokens),
        steps_((args.features + kStep - 1) / kStep), all_(tiles_ * kChains * steps_),
        memory_(scratch<TileGroup, PanelTiles>(2 * all_)), with_rest_(scratch<int, PanelTiles>(tiles_)) {
    for (int64_t i = 0; i < args.count; ++i) {
      const RowKind kind = args.formats[i].kind;
      if (place_of(kind) == kinds_) kind_[kinds_++] = kind;
    }
    starts_ = scratch<TileStart, PanelTiles>(2 * kinds_ * all_);
  }

  int64_t count() const { return tiles_; }
  int64_t steps() const { return steps_; }
  int64_t tile_groups() const { return kChains * steps_; }
  int64_t first_of(int64_t tile) const { return args_.tokens * tile / tiles_; }
  TileGroups operator[](int64_t tile) const {
    TileGroup* own = memory_ + tile * tile_groups();
    return {own, own + all_};
  }
  TileStarts starts(int64_t tile, RowKind kind) const {
    TileStart* own = starts_ + 2 * place_of(kind) * all_ + tile * tile_groups();
    return {own, own + all_};
  }
  // A bit for each token.
  int with_rest(int64_t tile) const { return with_rest_[tile]; }

  template <class T>
  void quantize_tile(int64_t tile) const {
    const TileGroups groups = (*this)[tile];
    for (int64_t g = 0; g < tile_groups(); ++g) groups.own[g].tokens_with_rest = 0;
    const int64_t first = first_of(tile), count = first_of(tile + 1) - first;
    for (int64_t i = 0; i < count; ++i) quantize_token<T>(first + i, i, groups);
    int& with_rest = with_rest_[tile] = 0;
    for (int64_t g = 0; g < tile_groups(); ++g) with_rest |= groups.own[g].tokens_with_rest;
    for (int place = 0; place < kinds_; ++place)
      for_kind(kind_[place], [&](auto kind) { start<decltype(kind)>(groups, starts(tile, kind_[place])); });
  }

 private:
  template <class T>
  void quantize_token(int64_t token, int64_t i, const TileGroups& groups) const {
    const T* x = static_cast<const T*>(args_.x) + token * args_.x_stride;
    const float outlier = outlier_square(x, args_.features);
    for (int64_t g = 0; g < tile_groups(); ++g) {
      const TileGroups to = groups.from(g % kChains * steps_ + g / kChains);
      const GroupSteps group(g * kGroup < args_.features ? x + g * kGroup : nullptr, outlier);
      to.own->put(i, group.own());
      if (!group.outliers) continue;
      to.own->tokens_with_rest |= 1 << i;
      to.rest->put(i, group.rest());
    }
  }

  template <class Kind>
  void start(const TileGroups& groups, const TileStarts& starts) const {
    for (int64_t g = 0; g < tile_groups(); ++g) {
      starts.own[g].set<Kind>(groups.own[g]);
      if (groups.own[g].tokens_with_rest) starts.rest[g].set<Kind>(groups.rest[g]);
    }
  }

  int place_of(RowKind kind) const {
    int place = 0;
    while (place < kinds_ && kind_[place] != kind) ++place;
    return place;
  }

  const LinearArgs& args_;
  const int64_t tiles_, steps_, all_;
  TileGroup* const memory_;
  TileStart* starts_;
  int* const with_rest_;
  RowKind kind_[kMostKinds];
  int kinds_ = 0;
};

// The bytes that come next, fetched by and by.
struct BytesAhead {
  const uint8_t *at, *end;
  int64_t lines;  // at a time

  void fetch() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

// What a side's sums have in common: the group's codes times those of some tokens, the first of them `from`.
template <class Form, int kCount>
inline __attribute__((always_inline)) void add_scaled(const PanelGroup<Form::kHalves>& w, const TileGroup& x, int from,
                                                      const WideInts (*sums)[kSides], WideFloats (*acc)[kSides]) {
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const WideFloats scale = all_lanes(x.scales[from + i]);
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      WideFloats& own = acc[i][side];
      own = fma(to_floats(sums[i][side]), mul(w.scale[side], scale), own);
      if constexpr (Form::kMinimum && Form::kHalves) {
        const WideInts low = mul_pairs(all_lanes(read<int>(x.pairs[from + i])), w.low[side]);
        own = fma(to_floats(low), mul(w.minimum[side], scale), own);
      } else if constexpr (Form::kMinimum) {
        own = fma(w.minimum[side], all_lanes(x.scaled_sums[from + i]), own);
      }
    }
  }
}

// acc: of the first of some tokens.
template <class Form, int kCount>
inline __attribute__((always_inline)) void add_some(const PanelGroup<Form::kHalves>& w, const TileGroup& x,
                                                    const TileStart& start, int from, WideFloats (*acc)[kSides]) {
  WideInts sums[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sums[i][0] = sums[i][1] = all_lanes(start.first[from + i]);
  if constexpr (Form::kHalves) {
    WideInts second[kCount][kSides];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) second[i][0] = second[i][1] = all_lanes(start.second[from + i]);
    add_quads<Form, 0, 4, kCount>(w.codes, &x.codes[0][from], sums);
    add_quads<Form, 4, 4, kCount>(w.codes, &x.codes[0][from], second);
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i)
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side)
        sums[i][side] = add(mul(sums[i][side], w.factors[side][0]), mul(second[i][side], w.factors[side][1]));
  } else {
    add_quads<Form, 0, 8, kCount>(w.codes, &x.codes[0][from], sums);
  }
  add_scaled<Form, kCount>(w, x, from, sums, acc);
}

// One chain of a tile's tokens with a panel's rows.
template <class Form, int kCount>
void multiply_chain(const PanelGroup<Form::kHalves>* w, const TileGroup* x, const TileStart* starts, int64_t steps,
                    BytesAhead* ahead, WideFloats (*chain)[kSides]) {
  // With two sums a row and token, half of the tokens are enough for the registers.
  constexpr int kFirst = Form::kHalves || kSignedBytes ? (kCount + 1) / 2 : kCount;
  WideFloats acc[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) acc[i][0] = acc[i][1] = WideFloats{};
  for (int64_t s = 0; s < steps; ++s) {
    ahead->fetch();
    add_some<Form, kFirst>(w[s], x[s], starts[s], 0, acc);
    if constexpr (kFirst < kCount) add_some<Form, kCount - kFirst>(w[s], x[s], starts[s], kFirst, acc + kFirst);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) chain[i][0] = acc[i][0], chain[i][1] = acc[i][1];
}

// The chain of second codes, of the tokens that have them.
template <class Form>
void multiply_rests(const PanelGroup<Form::kHalves>* w, const TileGroups& x, const TileStart* starts, int64_t steps,
                    WideFloats (*chain)[kSides]) {
  for (int i = 0; i < kPanelTokens; ++i) chain[i][0] = chain[i][1] = WideFloats{};
  for (int64_t s = 0; s < steps; ++s)
    for (int tokens = x.own[s].tokens_with_rest; tokens; tokens &= tokens - 1) {
      const int i = __builtin_ctz(tokens);
      add_some<Form, 1>(w[s], x.rest[s], starts[s], i, chain + i);
    }
}

template <class Form, int kCount = kPanelTokens>
inline void multiply_some_chains(int64_t count, const PanelGroup<Form::kHalves>* w, const TileGroup* x,
                                 const TileStart* starts, int64_t steps, BytesAhead* ahead,
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
  static int64_t tall_rows() { return 0; }
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
    BytesAhead ahead = {nullptr, nullptr, 0};
    if (next) {
      const int64_t bytes = next->rows * args_.formats[next->weight].row_bytes;
      ahead = {next->w, next->w + bytes, bytes / (64 * panels * size * x_.count()) + 1};
    }
    for (int64_t t = 0; t < x_.count(); ++t)
      for (int64_t p = 0; p < panels; ++p)
        multiply_tile(block, t, p, Panel<Kind>(groups + p * size, x_.steps()), &ahead);
  }

  template <class Kind>
  void take(const Block& block, int64_t number, const Panel<Kind>& panel) const {
    const int64_t row_bytes = args_.formats[block.weight].row_bytes;
    panel.take(block.w + number * kPanelRows * row_bytes, row_bytes, block.rows - number * kPanelRows, args_.features);
  }

  template <class Kind>
  void multiply_tile(const Block& block, int64_t tile, int64_t number, const Panel<Kind>& panel,
                     BytesAhead* ahead) const {
    using Form = typename Panel<Kind>::Form;
    const int64_t first = x_.first_of(tile), count = x_.first_of(tile + 1) - first, steps = x_.steps();
    const TileGroups x = x_[tile];
    const TileStarts starts = x_.starts(tile, args_.formats[block.weight].kind);
    const int with_rest = x_.with_rest(tile);
    WideFloats chains[kChains][kPanelTokens][kSides], rests[kChains][kPanelTokens][kSides];
    for (int64_t c = 0; c < kChains; ++c) {
      const int64_t at = c * steps;
      multiply_some_chains<Form>(count, panel.chain(c), x.own + at, starts.own + at, steps, ahead, chains[c]);
      if (with_rest) multiply_rests<Form>(panel.chain(c), x.from(at), starts.rest + at, steps, rests[c]);
    }
    const auto total = [](const auto& all, int64_t i, int side) {
      return add(add(all[0][i][side], all[1][i][side]), add(all[2][i][side], all[3][i][side]));
    };
    for (int64_t row = number * kPanelRows, at = 0; at < kPanelRows / kLanes; row += kLanes, ++at) {
      const int64_t left = block.rows - row;
      if (left <= 0) return;
      const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + row, block.y_stride,
                                      static_cast<int>(left < kLanes ? left : kLanes)};
      for (int64_t i = 0; i < count; ++i) {
        const auto sides = [&](int side) {
          const WideFloats own = total(chains, i, side);
          return with_rest >> i & 1 ? add(own, total(rests, i, side)) : own;
        };
        result.put(first + i, sixteen(sides, at));
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

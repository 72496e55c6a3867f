// The products of integer_products.h for many tokens, by AVX-512's vpdpbusd, with the very sums.
//
// kPanelRows rows of a weight, a panel, are made ready in the thread's own memory, with 16 rows side by side: four codes
// of each in a register, times four codes of a token in all lanes, go to a sum for each row. A tile of tokens passes a
// panel four times, for a chain each, so that 16 rows of a token need two registers: the sum in the group and the chain.
#pragma once

#if defined(__AVX512VNNI__)

#include "cpu/quantized/panel_rows_avx512.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

constexpr int kPanelTokens = 6;

// A group of a tile's tokens.
struct TileGroup {
  int codes[8][kPanelTokens];  // four columns each
  float scales[kPanelTokens], scaled_sums[kPanelTokens];
  int sums[kPanelTokens], first_sums[kPanelTokens];
  int16_t pairs[kPanelTokens][2];  // the sums of both halves

  void put(int64_t token, const GroupCodes& from) {
    from.store(reinterpret_cast<int8_t*>(&codes[0][token]), sizeof codes[0], sizeof codes / 2);
    scales[token] = from.scale, scaled_sums[token] = from.scale * static_cast<float>(from.sum);
    sums[token] = from.sum, first_sums[token] = from.first_sum;
    pairs[token][0] = static_cast<int16_t>(from.first_sum);
    pairs[token][1] = static_cast<int16_t>(from.sum - from.first_sum);
  }
};
// rest: the second codes, of the tokens that have them there; of others, whatever there was.
struct TileGroups {
  TileGroup own, rest;
  int tokens_with_rest;  // a bit for each
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
        steps_((args.features + kStep - 1) / kStep), memory_(scratch<TileGroups, PanelTiles>(tiles_ * tile_groups())) {}

  int64_t count() const { return tiles_; }
  int64_t steps() const { return steps_; }
  int64_t first_of(int64_t tile) const { return args_.tokens * tile / tiles_; }
  const TileGroups* operator[](int64_t tile) const { return memory_ + tile * tile_groups(); }

  template <class T>
  void quantize_tile(int64_t tile) const {
    const int64_t first = first_of(tile), count = first_of(tile + 1) - first;
    for (int64_t i = 0; i < count; ++i) {
      const T* x = static_cast<const T*>(args_.x) + (first + i) * args_.x_stride;
      const float outlier = outlier_square(x, args_.features);
      for (int64_t g = 0; g < kChains * steps_; ++g) {
        TileGroups& to = memory_[tile * tile_groups() + g % kChains * steps_ + g / kChains];
        const GroupSteps group(g * kGroup < args_.features ? x + g * kGroup : nullptr, outlier);
        if (i == 0) to.tokens_with_rest = 0;
        to.own.put(i, group.own());
        if (!group.outliers) continue;
        to.tokens_with_rest |= 1 << i;
        to.rest.put(i, group.rest());
      }
    }
  }

  void start(int64_t tile, int offset, bool halves, TileStarts* starts) const {
    const TileGroups* own = (*this)[tile];
    for (int64_t g = 0; g < tile_groups(); ++g) {
      starts[g].own.set(own[g].own, offset, halves);
      if (own[g].tokens_with_rest) starts[g].rest.set(own[g].rest, offset, halves);
    }
  }
  int64_t tile_groups() const { return kChains * steps_; }

 private:
  const LinearArgs& args_;
  const int64_t tiles_, steps_;
  TileGroups* const memory_;
};

// The bytes that come next, fetched by and by.
struct BytesAhead {
  const uint8_t *at, *end;
  int64_t lines;  // at a time

  void fetch() {
    for (int64_t i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};

inline __m512i all_lanes(const void* p) { return _mm512_set1_epi32(read<int>(p)); }

template <bool kMinimum, int kFrom, int kCount>
inline __attribute__((always_inline)) void add_some(const PanelGroup<false>& w, const TileGroup& x,
                                                    const TileStart& start, __m512 (*acc)[kSides]) {
  __m512i sums[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) sums[i][0] = sums[i][1] = _mm512_set1_epi32(start.first[kFrom + i]);
#pragma GCC unroll 16
  for (int q = 0; q < 8; ++q) {
    const __m512i codes[] = {w.codes[0][q], w.codes[1][q]};
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const __m512i own = _mm512_set1_epi32(x.codes[q][kFrom + i]);
      sums[i][0] = _mm512_dpbusd_epi32(sums[i][0], codes[0], own);
      sums[i][1] = _mm512_dpbusd_epi32(sums[i][1], codes[1], own);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const __m512 scale = _mm512_set1_ps(x.scales[kFrom + i]);
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      __m512& own = acc[kFrom + i][side];
      own = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[i][side]), _mm512_mul_ps(w.scale[side], scale), own);
      if constexpr (kMinimum) own = _mm512_fmadd_ps(w.minimum[side], _mm512_set1_ps(x.scaled_sums[kFrom + i]), own);
    }
  }
}

// Halves have factors.
template <bool kMinimum, int kFrom, int kCount>
inline __attribute__((always_inline)) void add_some(const PanelGroup<true>& w, const TileGroup& x,
                                                    const TileStart& start, __m512 (*acc)[kSides]) {
  __m512i a[kCount][kSides], b[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    a[i][0] = a[i][1] = _mm512_set1_epi32(start.first[kFrom + i]);
    b[i][0] = b[i][1] = _mm512_set1_epi32(start.second[kFrom + i]);
  }
#pragma GCC unroll 16
  for (int q = 0; q < 4; ++q) {
#pragma GCC unroll 16
    for (int i = 0; i < kCount; ++i) {
      const __m512i first = _mm512_set1_epi32(x.codes[q][kFrom + i]);
      const __m512i second = _mm512_set1_epi32(x.codes[4 + q][kFrom + i]);
#pragma GCC unroll 2
      for (int side = 0; side < kSides; ++side) {
        a[i][side] = _mm512_dpbusd_epi32(a[i][side], w.codes[side][q], first);
        b[i][side] = _mm512_dpbusd_epi32(b[i][side], w.codes[side][4 + q], second);
      }
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) {
    const __m512 scale = _mm512_set1_ps(x.scales[kFrom + i]);
#pragma GCC unroll 2
    for (int side = 0; side < kSides; ++side) {
      const __m512i total = _mm512_add_epi32(_mm512_mullo_epi32(a[i][side], w.factors[side][0]),
                                             _mm512_mullo_epi32(b[i][side], w.factors[side][1]));
      __m512& own = acc[kFrom + i][side];
      own = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total), _mm512_mul_ps(w.scale[side], scale), own);
      if constexpr (kMinimum) {
        const __m512i low = _mm512_madd_epi16(all_lanes(x.pairs[kFrom + i]), w.low[side]);
        own = _mm512_fmadd_ps(_mm512_cvtepi32_ps(low), _mm512_mul_ps(w.minimum[side], scale), own);
      }
    }
  }
}

// The second codes of the tokens that have them.
template <bool kMinimum, int kFrom, int kCount, bool kHalves>
inline __attribute__((always_inline)) void add_rest(const PanelGroup<kHalves>& w, const TileGroups& x,
                                                    const TileStart& start, __m512 (*acc)[kSides]) {
  __m512 with[kFrom + kCount][kSides];
#pragma GCC unroll 16
  for (int i = kFrom; i < kFrom + kCount; ++i) with[i][0] = acc[i][0], with[i][1] = acc[i][1];
  add_some<kMinimum, kFrom, kCount>(w, x.rest, start, with);
#pragma GCC unroll 16
  for (int i = kFrom; i < kFrom + kCount; ++i)
    if (x.tokens_with_rest >> i & 1) acc[i][0] = with[i][0], acc[i][1] = with[i][1];
}

// One chain of a tile's tokens with a panel's rows.
template <bool kHalves, bool kMinimum, int kCount>
void multiply_chain(const PanelGroup<kHalves>* w, const TileGroups* x, const TileStarts* starts, int64_t steps,
                    BytesAhead* ahead, __m512 (*chain)[kSides]) {
  // With two sums a row and token, half of the tokens are enough for the registers.
  constexpr int kFirst = kHalves ? (kCount + 1) / 2 : kCount;
  __m512 acc[kCount][kSides];
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) acc[i][0] = acc[i][1] = _mm512_setzero_ps();
  for (int64_t s = 0; s < steps; ++s) {
    ahead->fetch();
    add_some<kMinimum, 0, kFirst>(w[s], x[s].own, starts[s].own, acc);
    if constexpr (kFirst < kCount) add_some<kMinimum, kFirst, kCount - kFirst>(w[s], x[s].own, starts[s].own, acc);
    if (__builtin_expect(x[s].tokens_with_rest != 0, 0)) {
      add_rest<kMinimum, 0, kFirst>(w[s], x[s], starts[s].rest, acc);
      if constexpr (kFirst < kCount) add_rest<kMinimum, kFirst, kCount - kFirst>(w[s], x[s], starts[s].rest, acc);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kCount; ++i) chain[i][0] = acc[i][0], chain[i][1] = acc[i][1];
}

template <bool kHalves, bool kMinimum, int kCount = kPanelTokens>
inline void multiply_some_chains(int64_t count, const PanelGroup<kHalves>* w, const TileGroups* x,
                                 const TileStarts* starts, int64_t steps, BytesAhead* ahead, __m512 (*chain)[kSides]) {
  if (count == kCount) return multiply_chain<kHalves, kMinimum, kCount>(w, x, starts, steps, ahead, chain);
  if constexpr (kCount > 1)
    multiply_some_chains<kHalves, kMinimum, kCount - 1>(count, w, x, starts, steps, ahead, chain);
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

  int64_t row_bytes() const { return args_.features + args_.features / 4; }
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
    __m512 chains[kChains][kPanelTokens][kSides];
    for (int64_t c = 0; c < kChains; ++c)
      multiply_some_chains<Kind::kHalves, Kind::kMinimum>(count, panel.chain(c), x_[tile] + c * steps,
                                                          starts + c * steps, steps, ahead, chains[c]);
    for (int side = 0; side < kSides; ++side) {
      const int64_t row = number * kPanelRows + 16 * side, left = block.rows - row;
      if (left <= 0) return;
      const StepResult<T, Out> result{block.bias ? block.bias + row : nullptr, block.y + row, block.y_stride,
                                      static_cast<int>(left < 16 ? left : 16)};
      for (int64_t i = 0; i < count; ++i)
        result.put(first + i, {_mm512_add_ps(_mm512_add_ps(chains[0][i][side], chains[1][i][side]),
                                             _mm512_add_ps(chains[2][i][side], chains[3][i][side]))});
    }
  }

  const LinearArgs& args_;
  const PanelTiles x_;
};

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

#endif

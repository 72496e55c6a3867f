// A quantized weight's rows as elements of T: the float32 value, rounded once.
#pragma once

#include "cpu/common/scratch.h"
#include "cpu/quantized/unpack_groups.h"
#include "cpu/quantized/unpack_packed.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Rows of a kind of groups go by way of floats.
template <class Kind>
struct ByGroups {
  template <class T>
  static void row(const uint8_t* row, int64_t features, T* to) {
    if constexpr (__is_same(T, float)) {
      UnpackGroups<Kind>::row(row, features, to);
    } else {
      float* floats = scratch<float, ByGroups>(features);
      UnpackGroups<Kind>::row(row, features, floats);
      for (int64_t k = 0; k < features; k += kLanes) {
        const int n = static_cast<int>(features - k < kLanes ? features - k : kLanes);
        store_first(to + k, load_first(floats + k, n), n);
      }
    }
  }
};

// Calls with(kind), a value of the kind of unpacking that reads rows of codes; false: they are no such rows.
template <class With>
inline bool with_codes(const RowFormat& format, const With& with) {
  switch (format.kind) {
    case RowKind::affine4: return with(UnpackAffine<4>{}), true;
    case RowKind::affine8: return with(UnpackAffine<8>{}), true;
    case RowKind::table4: return with(UnpackTable<4>{}), true;
    case RowKind::table8:
      if (is_small_floats(static_cast<const float*>(format.aux))) return with(UnpackSmallFloats{}), true;
      return with(UnpackTable<8>{}), true;
    default: return false;
  }
}

// `count` rows, one behind the other, to as many rows of elements.
template <class T>
inline void unpack_rows(const RowFormat& format, const uint8_t* rows, int64_t count, int64_t features, T* to) {
  const auto plain = [&](auto kind) {
    for (int64_t i = 0; i < count; ++i) decltype(kind)::row(rows + i * format.row_bytes, features, to + i * features);
  };
  const bool done = with_codes(format, [&](auto kind) {
    for (int64_t i = 0; i < count; ++i)
      decltype(kind)::columns(format, rows + i * format.row_bytes, features, 0, features, to + i * features);
  });
  if (done) return;
  switch (format.kind) {
    case RowKind::f32: return plain(UnpackElements<float>{});
    case RowKind::f16: return plain(UnpackElements<fp16>{});
    case RowKind::bf16: return plain(UnpackElements<bf16>{});
    case RowKind::q4_0: return plain(ByGroups<Q4_0>{});
    case RowKind::q4_1: return plain(ByGroups<Q4_1>{});
    case RowKind::q5_0: return plain(ByGroups<Q5_0>{});
    case RowKind::q5_1: return plain(ByGroups<Q5_1>{});
    case RowKind::q8_0: return plain(ByGroups<Q8_0>{});
    case RowKind::q2_k: return plain(ByGroups<Q2_K>{});
    case RowKind::q3_k: return plain(ByGroups<Q3_K>{});
    case RowKind::q4_k: return plain(ByGroups<Q4_K>{});
    case RowKind::q5_k: return plain(ByGroups<Q5_K>{});
    case RowKind::q6_k: return plain(ByGroups<Q6_K>{});
    case RowKind::mxfp4: return plain(ByGroups<MxFp4>{});
    case RowKind::int8_rows: return plain(UnpackInt8{});
    default: return;
  }
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

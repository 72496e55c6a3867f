// A quantized weight's rows as elements of T: the float32 value, rounded once.
#pragma once

#include "cpu/common/scratch.h"
#include "cpu/quantized/unpack_groups.h"
#include "cpu/quantized/unpack_packed.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

inline void unpack_floats(const RowFormat& format, const uint8_t* row, int64_t features, float* to) {
  switch (format.kind) {
    case RowKind::f32: return UnpackElements<float>::row(row, features, to);
    case RowKind::f16: return UnpackElements<fp16>::row(row, features, to);
    case RowKind::bf16: return UnpackElements<bf16>::row(row, features, to);
    case RowKind::q4_0: return UnpackGroups<Q4_0>::row(row, features, to);
    case RowKind::q4_1: return UnpackGroups<Q4_1>::row(row, features, to);
    case RowKind::q5_0: return UnpackGroups<Q5_0>::row(row, features, to);
    case RowKind::q5_1: return UnpackGroups<Q5_1>::row(row, features, to);
    case RowKind::q8_0: return UnpackGroups<Q8_0>::row(row, features, to);
    case RowKind::q2_k: return UnpackGroups<Q2_K>::row(row, features, to);
    case RowKind::q3_k: return UnpackGroups<Q3_K>::row(row, features, to);
    case RowKind::q4_k: return UnpackGroups<Q4_K>::row(row, features, to);
    case RowKind::q5_k: return UnpackGroups<Q5_K>::row(row, features, to);
    case RowKind::q6_k: return UnpackGroups<Q6_K>::row(row, features, to);
    case RowKind::mxfp4: return UnpackGroups<MxFp4>::row(row, features, to);
    case RowKind::int8_rows: return UnpackInt8::row(row, features, to);
    case RowKind::affine4: return UnpackAffine<4>::row(format, row, features, to);
    case RowKind::affine8: return UnpackAffine<8>::row(format, row, features, to);
    case RowKind::table4: return UnpackTable<4>::row(format, row, features, to);
    case RowKind::table8: return UnpackTable<8>::row(format, row, features, to);
  }
}

struct UnpackedRow;  // names the memory of a row in between

template <class T>
inline void unpack_row(const RowFormat& format, const uint8_t* row, int64_t features, T* to) {
  if constexpr (__is_same(T, float)) {
    unpack_floats(format, row, features, to);
  } else {
    float* floats = scratch<float, UnpackedRow>(features);
    unpack_floats(format, row, features, floats);
    for (int64_t k = 0; k < features; k += kLanes) {
      const int n = static_cast<int>(features - k < kLanes ? features - k : kLanes);
      store_first(to + k, load_first(floats + k, n), n);
    }
  }
}

}  // namespace
}  // namespace QUIRE_ISA
}  // namespace quire

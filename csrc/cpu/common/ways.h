// In which of three ways products with rows of bytes are made: elements of x's own dtype are the linear kernel's; whole
// numbers in groups, or with one scale a row, are multiplied by x in int8; all others become elements of x's dtype first.
#pragma once

#include "arguments.h"

namespace quire {
namespace {  // each instruction set has its own

enum class Way { elements, unpacked, groups, rows };

inline Way way_of(RowKind kind, DType dtype) {
  switch (kind) {
    case RowKind::f32: return dtype == DType::float32 ? Way::elements : Way::unpacked;
    case RowKind::f16: return dtype == DType::float16 ? Way::elements : Way::unpacked;
    case RowKind::bf16: return dtype == DType::bfloat16 ? Way::elements : Way::unpacked;
    case RowKind::affine4:
    case RowKind::affine8:
    case RowKind::table4:
    case RowKind::table8: return Way::unpacked;
    case RowKind::int8_rows: return Way::rows;
    default: return Way::groups;
  }
}

inline bool is_integer(Way way) { return way == Way::groups || way == Way::rows; }

}  // namespace
}  // namespace quire

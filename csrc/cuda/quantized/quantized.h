// What quantized products and lookups share on the host: a format as the kernels read it, and who multiplies what.
#pragma once

#include "cuda/common/kernels.h"
#include "cuda/quantized/launch.h"

namespace quire::cuda {

inline RowsLayout layout_of(const RowFormat& format, int64_t features) {
  RowsLayout layout{};
  layout.aux = format.aux, layout.row_bytes = format.row_bytes;
  const int64_t group = format.group > 0 ? std::min(format.group, features) : features;
  layout.group = static_cast<int>(std::max(group, int64_t{1}));
  layout.group_shift = -1;
  if (group == features) {
    layout.group_shift = 31;
  } else if ((group & (group - 1)) == 0) {
    for (layout.group_shift = 0; int64_t{1} << layout.group_shift < group; ++layout.group_shift) {
    }
  }
  layout.groups = static_cast<uint32_t>(divide_up(features, layout.group));
  layout.codes = static_cast<int>(4 * layout.groups);
  if (format.zeros) layout.zeros = layout.codes, layout.codes *= 2;
  if (format.kind == RowKind::int8_rows) layout.flip = 0x80808080u;
  return layout;
}

// Rows first .. first + count of a matrix of `features` columns, each number rounded once to dtype: to [count, features].
void unpack_rows(const void* data, const RowFormat& format, int64_t features, int64_t first, int64_t count, void* to,
                 DType dtype, Stream stream);

// The products of float x, of any kind.
void launch_floats(RowKind kind, const QuantizedCall& args, Stream stream);

// Whether a kind's own kernels read such rows.
inline bool has_products(RowKind kind, const RowsLayout& layout) {
  switch (kind) {
    case RowKind::f32:
    case RowKind::f16:
    case RowKind::bf16: return false;
    case RowKind::affine4:
    case RowKind::affine8: return layout.aux || layout.group_shift >= 3;
    case RowKind::table4:
    case RowKind::table8: return layout.group_shift >= 3;
    default: return true;
  }
}

inline void launch_products(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream) {
  switch (kind) {
    case RowKind::q2_k:
    case RowKind::q3_k:
    case RowKind::q4_k:
    case RowKind::q5_k:
    case RowKind::q6_k: return launch_super_blocks(kind, dtype, args, stream);
    case RowKind::affine4:
    case RowKind::affine8:
    case RowKind::table4:
    case RowKind::table8:
    case RowKind::int8_rows: return launch_packed(kind, dtype, args, stream);
    default: return launch_blocks(kind, dtype, args, stream);
  }
}

}  // namespace quire::cuda

// A matrix whose rows are bytes, read as linear/product.h reads w: every number becomes the float that the bytes mean,
// then a T, rounded once. So a product has the bits of one with a matrix of those T's.
#pragma once

#include "cuda/quantized/blocks.h"
#include "cuda/quantized/packed.h"
#include "cuda/quantized/super_blocks.h"

namespace quire::cuda {

template <class T, class Kind>
struct QuantizedRows {
  static constexpr bool kPlain = false;
  using Row = const uint8_t*;
  using Share = typename Kind::Share;
  const uint8_t* data;
  int rows;
  const RowsLayout& layout;

  __device__ __forceinline__ int count() const { return rows; }
  __device__ __forceinline__ Row row(int number) const {
    return data + static_cast<int64_t>(min(number, rows - 1)) * layout.row_bytes;
  }
  __device__ __forceinline__ void fetch(Share& share, Row row, int unit, int run, int t, int features) const {
    const Columns at{unit, run, t, features};
    if (at.first() < features) Kind::fetch(share, layout, row, at);
  }
  __device__ __forceinline__ uint4 values(const Share& share, Row row, int unit, int run, int t, int features) const {
    const Columns at{unit, run, t, features};
    if (at.first() >= features) return make_uint4(0, 0, 0, 0);
    float eight[8];
    Kind::values(eight, share, layout, row, at);
    return make_uint4(pack2<T>(eight[0], eight[1]), pack2<T>(eight[2], eight[3]), pack2<T>(eight[4], eight[5]),
                      pack2<T>(eight[6], eight[7]));
  }
};

// Calls function(Kind{}) for the kind that a number names.
template <class Function>
__host__ __device__ __forceinline__ void for_kind(RowKind kind, const Function& function) {
  switch (kind) {
    case RowKind::f32: return function(Floats<float>{});
    case RowKind::f16: return function(Floats<f16>{});
    case RowKind::bf16: return function(Floats<bf16>{});
    case RowKind::q4_0: return function(Q4_0{});
    case RowKind::q4_1: return function(Q4_1{});
    case RowKind::q5_0: return function(Q5_0{});
    case RowKind::q5_1: return function(Q5_1{});
    case RowKind::q8_0: return function(Q8_0{});
    case RowKind::q2_k: return function(Q2_K{});
    case RowKind::q3_k: return function(Q3_K{});
    case RowKind::q4_k: return function(Q4_K{});
    case RowKind::q5_k: return function(Q5_K{});
    case RowKind::q6_k: return function(Q6_K{});
    case RowKind::mxfp4: return function(Mxfp4{});
    case RowKind::affine4: return function(Packed<4, false, true>{});
    case RowKind::int8_rows:
    case RowKind::affine8: return function(Packed<8, false, true>{});
    case RowKind::table4: return function(Packed<4, true, true>{});
    case RowKind::table8: return function(Packed<8, true, true>{});
  }
}

}  // namespace quire::cuda

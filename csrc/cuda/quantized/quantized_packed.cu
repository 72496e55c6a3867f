// The products of rows of codes behind their scales.
#include "cuda/quantized/launch.h"

namespace quire::cuda {

void launch_packed(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream) {
  switch (kind) {
    case RowKind::affine4: return launch_as<Packed<4, false, false>>(dtype, args, stream);
    case RowKind::table4: return launch_as<Packed<4, true, false>>(dtype, args, stream);
    case RowKind::table8: return launch_as<Packed<8, true, false>>(dtype, args, stream);
    default: return launch_as<Packed<8, false, false>>(dtype, args, stream);
  }
}

}  // namespace quire::cuda

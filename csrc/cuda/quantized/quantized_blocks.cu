// The products of GGML's kinds with blocks of 32 columns.
#include "cuda/quantized/launch.h"

namespace quire::cuda {

void launch_blocks(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream) {
  switch (kind) {
    case RowKind::q4_0: return launch_as<Q4_0>(dtype, args, stream);
    case RowKind::q4_1: return launch_as<Q4_1>(dtype, args, stream);
    case RowKind::q5_0: return launch_as<Q5_0>(dtype, args, stream);
    case RowKind::q5_1: return launch_as<Q5_1>(dtype, args, stream);
    case RowKind::q8_0: return launch_as<Q8_0>(dtype, args, stream);
    default: return launch_as<Mxfp4>(dtype, args, stream);
  }
}

}  // namespace quire::cuda

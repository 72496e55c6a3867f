// The products of GGML's kinds with blocks of 256 columns.
#include "cuda/quantized/launch.h"

namespace quire::cuda {

void launch_super_blocks(RowKind kind, DType dtype, const QuantizedCall& args, Stream stream) {
  switch (kind) {
    case RowKind::q2_k: return launch_as<Q2_K>(dtype, args, stream);
    case RowKind::q3_k: return launch_as<Q3_K>(dtype, args, stream);
    case RowKind::q4_k: return launch_as<Q4_K>(dtype, args, stream);
    case RowKind::q5_k: return launch_as<Q5_K>(dtype, args, stream);
    default: return launch_as<Q6_K>(dtype, args, stream);
  }
}

}  // namespace quire::cuda

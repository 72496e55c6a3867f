// y = x W^T + b for a list of weights, on row-major weights as they lie in a safetensors file.
//
// Every output element is one dot product along K with one fixed chain of additions (the vector unit's or the matrix
// unit's, by element type and instruction set alone), then the bias. Tiles only decide which dot products share
// registers. So no element depends on the other tokens, the other weights, or the number of threads.
#include "cpu/common/kernels.h"
#include "cpu/linear/linear_run.h"

namespace quire {
namespace QUIRE_ISA {

void linear(const LinearArgs& args) {
  switch (args.dtype) {
    case DType::float32: return linear_of<float, AsTheyLie>(args);
    case DType::bfloat16: return linear_of<bf16, AsTheyLie>(args);
    case DType::float16: return linear_of<fp16, AsTheyLie>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

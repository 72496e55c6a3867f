// Products of weights whose rows are bytes and become elements of x's dtype first.
#include "cpu/common/kernels.h"
#include "cpu/quantized/unpacked_products.h"

namespace quire {
namespace QUIRE_ISA {

void unpacked_linear(const LinearArgs& args) {
  switch (args.dtype) {
    case DType::float32: return linear_of<float, Unpacked>(args);
    case DType::bfloat16: return linear_of<bf16, Unpacked>(args);
    case DType::float16: return linear_of<fp16, Unpacked>(args);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire

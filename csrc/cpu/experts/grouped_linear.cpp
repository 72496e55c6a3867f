// y = x W^T + b where each row of x has the weights of its own expert; rows come sorted by expert. Quantized weights of
// the call are passed by.
#include "cpu/common/kernels.h"
#include "cpu/common/ways.h"
#include "cpu/experts/grouped_run.h"
#include "cpu/linear/linear_run.h"

namespace quire {
namespace QUIRE_ISA {

void grouped_linear(const GroupedLinearArgs& args) {
  if (args.rows == 0 || args.count == 0) return;
  GroupedLinearArgs elements = args;
  elements.formats = nullptr;
  grouped_linear_of<AsTheyLie>(elements, [&args](int64_t expert, int64_t weight) {
    return !args.formats || way_of(args.formats[expert * args.count + weight].kind, args.dtype) == Way::elements;
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

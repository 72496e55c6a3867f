// y = x W^T + b where each row of x has the weights of its own expert; rows come sorted by expert.
#include "cpu/common/kernels.h"
#include "cpu/experts/grouped_run.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Products that take weights as they lie.
template <class Products>
using AsTheyLie = Products;

}  // namespace

void grouped_linear(const GroupedLinearArgs& args) {
  if (args.rows == 0 || args.count == 0) return;
  grouped_linear_of<AsTheyLie>(args, [](int64_t, int64_t) { return true; });
}

}  // namespace QUIRE_ISA
}  // namespace quire

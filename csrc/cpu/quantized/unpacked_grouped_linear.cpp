// Products of experts' weights that become elements of x's dtype first: of a row by its own expert's, which have the bits
// of linear on that expert's unpacked weights and that row alone. Other weights of the call are passed by.
#include "cpu/common/kernels.h"
#include "cpu/common/ways.h"
#include "cpu/experts/grouped_run.h"
#include "cpu/quantized/unpacked_products.h"

namespace quire {
namespace QUIRE_ISA {

void unpacked_grouped_linear(const GroupedLinearArgs& args) {
  grouped_linear_of<Unpacked>(args, [&args](int64_t expert, int64_t weight) {
    return way_of(args.formats[expert * args.count + weight].kind, args.dtype) == Way::unpacked;
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire

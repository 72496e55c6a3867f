// Products of experts' weights that are, or become, elements of x's dtype: of a row by its own expert's, which have the
// bits of linear on that expert's unpacked weights and that row alone. Other weights of the call are passed by.
#include "cpu/common/kernels.h"
#include "cpu/experts/grouped_run.h"
#include "cpu/quantized/unpacked_products.h"
#include "cpu/quantized/ways.h"

namespace quire {
namespace QUIRE_ISA {
namespace {

// Products that take weights as they lie.
template <class Products>
using AsTheyLie = Products;

}  // namespace

void unpacked_grouped_linear(const GroupedLinearArgs& args) {
  const auto goes = [&args](Way way) {
    return [&args, way](int64_t expert, int64_t weight) {
      return way_of(args.formats[expert * args.count + weight].kind, args.dtype) == way;
    };
  };
  grouped_linear_of<Unpacked>(args, goes(Way::unpacked));
  GroupedLinearArgs elements = args;
  elements.formats = nullptr;
  grouped_linear_of<AsTheyLie>(elements, goes(Way::elements));
}

}  // namespace QUIRE_ISA
}  // namespace quire

// Products with weights whose rows are bytes, by an instruction set's kernels.
#pragma once

#include "cpu/common/isa.h"

namespace quire {

void multiply_quantized(const Isa& isa, const LinearArgs& args);

}  // namespace quire

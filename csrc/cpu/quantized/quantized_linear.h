// Products with weights whose rows are bytes, by an instruction set's kernels.
#pragma once

#include "cpu/common/isa.h"

namespace quire {

void multiply_quantized(const Isa& isa, const LinearArgs& args);
void multiply_quantized_experts(const Isa& isa, const GroupedLinearArgs& args);

}  // namespace quire

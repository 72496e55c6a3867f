// Which instruction sets were compiled, which this machine has, and the table of the one in use.
#pragma once

#include "cpu/common/kernels.h"

namespace quire {

struct Isa {
  const char* name;
  const Kernels* kernels;
  // Of weights that are whole numbers. Sets that differ in their products of bytes alone have one table of kernels.
  void (*integer_linear)(const LinearArgs&);
  void (*integer_grouped_linear)(const GroupedLinearArgs&);
  bool supported;  // by this processor and its operating system
};

// Best first; `count` entries.
const Isa* isas(int* count);

}  // namespace quire

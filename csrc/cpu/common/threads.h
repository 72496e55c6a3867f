// How the bindings tell parallel.cpp whose threads to use. Addresses of functions, because nothing here links to torch.
#pragma once

#include <stdint.h>

namespace quire {

void use_openmp(uintptr_t parallel);        // address of GOMP_parallel; 0: own threads
void use_thread_count(uintptr_t function);  // address of int at::get_num_threads(); 0: what set_thread_count said
void set_thread_count(int threads);
bool uses_openmp();
int max_threads();

}  // namespace quire

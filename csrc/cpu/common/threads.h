// How the bindings tell parallel.cpp whose threads to use, and which calls follow each other. Addresses of functions,
// because nothing here links to torch.
#pragma once

#include <stdint.h>

namespace quire {

void use_openmp(uintptr_t parallel);        // address of GOMP_parallel; 0: own threads
void use_thread_count(uintptr_t function);  // address of int at::get_num_threads(); 0: what set_thread_count said
void set_thread_count(int threads);
bool uses_openmp();
int max_threads();
// Make calls(data), all of whose teams are one: its threads wait awake between one task and the next, and who comes late
// to a task is not waited for. Throws what calls throws.
void keep_team(void (*calls)(void*), void* data);
// Make calls(data) without any team: the calling thread alone does it all. Throws what calls throws.
void keep_alone(void (*calls)(void*), void* data);
// Seconds for which the calling thread has had a core; always 0 where the system does not tell.
double core_seconds();
// How many teams the calling thread has asked for.
int64_t teams_asked_for();

}  // namespace quire

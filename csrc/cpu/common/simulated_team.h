// A team of many threads on a machine of few cores, to see how evenly work falls among them.
//
// One of its threads runs at a time, the one whose clock is behind all others', and until it claims its next piece. A
// clock is the time for which its thread has had a core, and the caller's is the first to run, as the others wake a few
// microseconds later: so pieces are claimed about in the order in which a machine with as many cores would claim them,
// and a region takes what its last thread's clock shows. What caches and memory would do there is not in it.
#pragma once

namespace quire {

constexpr int kMostSimulated = 64;

struct SimulatedTime {
  long long regions = 0;  // that a team has run
  double work = 0;        // seconds for which threads have worked, without what they have waited for one another
  double last = 0;        // of the last thread of each region: what the caller would have waited
};

// From now on teams of so many threads are simulated, kMostSimulated at most; 0: no more. Forgets the time that was
// simulated. Not while kernels run. Throws std::invalid_argument.
void simulate_team(int threads);
SimulatedTime simulated_time();

// For parallel.cpp: 0, or the size of the simulated team.
int simulated_threads();
void run_simulated(int threads, void (*task)(void*), void* data);
// The calling thread waits for another one of its region. False: it is in none.
bool simulated_wait();

}  // namespace quire

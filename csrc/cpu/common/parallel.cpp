// Two ways to a team of threads. `use_openmp` names the entry points of the OpenMP runtime that torch has loaded
// (native.py finds them): a region opened there runs on the very threads that torch's own regions run on. Without
// such a runtime, `OwnThreads` below. Opening a region and closing it takes microseconds: calls that follow each other
// share one, in which threads look for tasks (`KeptTeam`).
#define QUIRE_ISA portable
#include "cpu/common/parallel.h"

#include <time.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/common/simulated_team.h"
#include "cpu/common/threads.h"

namespace quire {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel gomp_parallel = nullptr;
int (*torch_num_threads)() = nullptr;
std::atomic<int> fixed_num_threads{1};

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Threads that wait a short while for the next region before they sleep. One region at a time: a second caller,
// or a region inside a region, runs alone on its own thread.
class OwnThreads {
 public:
  void run(int threads, void (*task)(void*), void* data) {
    std::unique_lock<std::mutex> alone(region_, std::try_to_lock);
    if (!alone.owns_lock() || threads <= 1) return task(data);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1)
        workers_.emplace_back(
            [this, id = static_cast<int>(workers_.size()), seen = generation_.load()] { work(id, seen); });
      task_ = task, data_ = data, wanted_ = threads - 1;
      busy_.store(wanted_);
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    task(data);
    for (int spins = 0; busy_.load() > 0; ++spins)
      if (spins > kSpins) std::this_thread::yield();
  }

 private:
  static constexpr int kSpins = 20000;

  void work(int id, unsigned seen) {
    for (;;) {
      for (int spins = 0; spins < kSpins && generation_.load() == seen; ++spins) pause();
      void (*task)(void*);
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        if (id >= wanted_) continue;
        task = task_;
      }
      task(data_);
      busy_.fetch_sub(1);
    }
  }

  std::mutex region_, mutex_;
  std::condition_variable wake_;
  std::atomic<unsigned> generation_{0};
  std::atomic<int> busy_{0};
  void (*task_)(void*) = nullptr;
  void* data_ = nullptr;
  int wanted_ = 0;
  std::vector<std::thread> workers_;
};

// Threads that are in one region already, and one that gives them tasks.
//
// `door_` counts the tasks, in its upper half, and in its lower one those who are inside one, with a bit that says
// whether more may enter. A thread that has not entered when the task is done finds the door shut: nobody waits for it.
class KeptTeam {
 public:
  // By the thread that gives the tasks.
  void run(int threads, void (*task)(void*), void* data) {
    task_ = task, data_ = data, helpers_ = static_cast<uint64_t>(threads - 1);
    const uint64_t number = (door_.load(std::memory_order_relaxed) >> kNumberShift) + 1;
    door_.store(number << kNumberShift | kOpen, std::memory_order_release);
    task(data);
    uint64_t inside = door_.fetch_and(~kOpen, std::memory_order_acquire) & kInside;
    for (int spins = 0; inside > 0; inside = door_.load(std::memory_order_acquire) & kInside) wait(&spins);
  }
  void end() { ended_.store(true, std::memory_order_release); }

  // By all others, until `end`.
  void help() {
    uint64_t last = 0;
    for (int spins = 0; !ended_.load(std::memory_order_acquire);) {
      uint64_t door = door_.load(std::memory_order_acquire);
      const uint64_t number = door >> kNumberShift;
      if (!(door & kOpen) || number == last || (door & kInside) >= helpers_) {
        wait(&spins);
        continue;
      }
      if (!door_.compare_exchange_weak(door, door + 1, std::memory_order_acq_rel)) continue;
      task_(data_);
      door_.fetch_sub(1, std::memory_order_release);
      last = number, spins = 0;
    }
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 16, kInside = kOpen - 1;
  static constexpr int kNumberShift = 17, kSpins = 2000;  // tens of microseconds

  static void wait(int* spins) {
    if (++*spins < kSpins) return pause();
    std::this_thread::yield();
  }

  alignas(64) std::atomic<uint64_t> door_{0};
  std::atomic<bool> ended_{false};
  alignas(64) void (*task_)(void*) = nullptr;
  void* data_ = nullptr;
  std::atomic<uint64_t> helpers_{0};
};

thread_local KeptTeam* kept = nullptr;  // of the thread that gives tasks, while it is in none
thread_local int64_t asked_for = 0;
thread_local bool alone = false;

// Never destroyed: its threads run until the process ends.
OwnThreads& own_threads() {
  static OwnThreads* threads = new OwnThreads;
  return *threads;
}

}  // namespace

void yield_thread() {
  if (simulated_threads() == 0 || !simulated_wait()) std::this_thread::yield();
}

void use_openmp(uintptr_t parallel) { gomp_parallel = reinterpret_cast<GompParallel>(parallel); }
void use_thread_count(uintptr_t function) { torch_num_threads = reinterpret_cast<int (*)()>(function); }
void set_thread_count(int threads) { fixed_num_threads = threads > 0 ? threads : 1; }
bool uses_openmp() { return gomp_parallel != nullptr; }

int max_threads() {
  if (alone) return 1;
  if (const int simulated = simulated_threads()) return simulated;
  return torch_num_threads ? torch_num_threads() : fixed_num_threads.load();
}

int64_t teams_asked_for() { return asked_for; }

void run_team(int threads, void (*task)(void*), void* data) {
  ++asked_for;
  if (simulated_threads() > 0) return run_simulated(threads, task, data);
  if (KeptTeam* team = kept) {
    kept = nullptr;  // a region within the task is its thread's own
    team->run(threads, task, data);
    kept = team;
    return;
  }
  if (gomp_parallel) return gomp_parallel(task, data, static_cast<unsigned>(threads), 0);
  own_threads().run(threads, task, data);
}

void keep_team(void (*calls)(void*), void* data) {
  const int threads = max_threads();
  if (!gomp_parallel || threads <= 1 || kept || simulated_threads() > 0) return calls(data);
  struct Shared {
    void (*calls)(void*);
    void* data;
    const std::thread::id giver;
    KeptTeam team;
    std::exception_ptr error;
  } shared{calls, data, std::this_thread::get_id(), {}, nullptr};
  gomp_parallel(
      [](void* data) {
        Shared& shared = *static_cast<Shared*>(data);
        if (std::this_thread::get_id() != shared.giver) return shared.team.help();
        kept = &shared.team;
        try {
          shared.calls(shared.data);
        } catch (...) {
          shared.error = std::current_exception();
        }
        kept = nullptr;
        shared.team.end();
      },
      &shared, static_cast<unsigned>(threads), 0);
  if (shared.error) std::rethrow_exception(shared.error);
}

void keep_alone(void (*calls)(void*), void* data) {
  struct Alone {
    const bool before = alone;
    Alone() { alone = true; }
    ~Alone() { alone = before; }
  } now;
  calls(data);
}

double core_seconds() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  timespec time;
  if (clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0)
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
#endif
  return 0;
}

}  // namespace quire

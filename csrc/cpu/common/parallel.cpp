// Two ways to a team of threads. `use_openmp` names the entry points of the OpenMP runtime that torch has loaded
// (native.py finds them): a region opened there runs on the very threads that torch's own regions run on. Without
// such a runtime, `OwnThreads` below.
#define QUIRE_ISA portable
#include "cpu/common/parallel.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/common/threads.h"

namespace quire {
namespace {

using GompParallel = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);

GompParallel gomp_parallel = nullptr;
int (*torch_num_threads)() = nullptr;
std::atomic<int> fixed_num_threads{1};

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

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
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

// Never destroyed: its threads run until the process ends.
OwnThreads& own_threads() {
  static OwnThreads* threads = new OwnThreads;
  return *threads;
}

}  // namespace

void yield_thread() { std::this_thread::yield(); }

void use_openmp(uintptr_t parallel) { gomp_parallel = reinterpret_cast<GompParallel>(parallel); }
void use_thread_count(uintptr_t function) { torch_num_threads = reinterpret_cast<int (*)()>(function); }
void set_thread_count(int threads) { fixed_num_threads = threads > 0 ? threads : 1; }
bool uses_openmp() { return gomp_parallel != nullptr; }

int max_threads() { return torch_num_threads ? torch_num_threads() : fixed_num_threads.load(); }

void run_team(int threads, void (*task)(void*), void* data) {
  if (gomp_parallel) return gomp_parallel(task, data, static_cast<unsigned>(threads), 0);
  own_threads().run(threads, task, data);
}

}  // namespace quire

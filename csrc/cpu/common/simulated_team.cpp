#define QUIRE_ISA portable
#include "cpu/common/simulated_team.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/common/threads.h"

namespace quire {
namespace {

// Threads stay, as what they keep for themselves (scratch.h) does; the caller of a region is number 0.
class SimulatedTeam {
 public:
  explicit SimulatedTeam(int size) : places_(static_cast<size_t>(size)) {
    for (int number = 1; number < size; ++number) threads_.emplace_back([this, number] { serve(number); });
  }
  ~SimulatedTeam() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    for (Place& place : places_) place.turn.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  SimulatedTeam(const SimulatedTeam&) = delete;
  SimulatedTeam& operator=(const SimulatedTeam&) = delete;

  int size() const { return static_cast<int>(places_.size()); }
  const SimulatedTime& time() const { return time_; }

  void run(int threads, void (*task)(void*), void* data) {
    if (current != nullptr) return task(data);  // a region within a region is its thread's own
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = task, data_ = data;
    for (int number = 0; number < threads; ++number) places_[static_cast<size_t>(number)].clock = 0;
    for (int number = 0; number < threads; ++number) places_[static_cast<size_t>(number)].inside = true;
    running_ = 0;
    work(0, lock);
    places_[0].turn.wait(lock, [this] { return running_ < 0; });
    ++time_.regions;
    double last = 0;
    for (int number = 0; number < threads; ++number) {
      time_.work += places_[static_cast<size_t>(number)].clock;
      last = std::max(last, places_[static_cast<size_t>(number)].clock);
    }
    time_.last += last;
  }

  // The running thread lets the one go on whose clock is behind; waits: not itself, if there is another.
  static void pass(bool waits) {
    SimulatedTeam* team = current;
    if (team == nullptr) return;
    std::unique_lock<std::mutex> lock(team->mutex_);
    const int own = team->running_;
    team->stop_clock();
    const int next = team->behind(waits ? own : -1);
    if (next < 0) return team->start_clock();
    if (waits) {  // until then, at least
      Place& place = team->places_[static_cast<size_t>(own)];
      place.clock = std::max(place.clock, team->places_[static_cast<size_t>(next)].clock);
    }
    team->hand_over(next);
    team->places_[static_cast<size_t>(own)].turn.wait(lock, [&] { return team->running_ == own; });
    team->start_clock();
  }

 private:
  struct Place {
    double clock = 0;     // seconds, in this region
    bool inside = false;  // the region, and not at its end
    std::condition_variable turn;
  };

  void serve(int number) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      places_[static_cast<size_t>(number)].turn.wait(lock, [&] { return ended_ || running_ == number; });
      if (ended_) return;
      work(number, lock);
    }
  }

  // The thread's part of the region; it has its turn.
  void work(int number, std::unique_lock<std::mutex>& lock) {
    start_clock();
    lock.unlock();
    current = this;
    task_(data_);
    current = nullptr;
    lock.lock();
    stop_clock();
    places_[static_cast<size_t>(number)].inside = false;
    hand_over(behind(-1));
  }

  // Whose turn it is: -1 where all are done, which the caller of the region hears of.
  void hand_over(int next) {
    running_ = next;
    places_[static_cast<size_t>(next < 0 ? 0 : next)].turn.notify_all();
  }

  int behind(int but) const {
    int found = -1;
    for (int number = 0; number < size(); ++number) {
      const Place& place = places_[static_cast<size_t>(number)];
      if (!place.inside || number == but) continue;
      if (found < 0 || place.clock < places_[static_cast<size_t>(found)].clock) found = number;
    }
    return found;
  }

  void start_clock() { begun_ = core_seconds(); }
  void stop_clock() { places_[static_cast<size_t>(running_)].clock += core_seconds() - begun_; }

  static thread_local SimulatedTeam* current;  // in whose region the thread is

  std::mutex mutex_;
  std::vector<Place> places_;
  std::vector<std::thread> threads_;
  SimulatedTime time_;
  void (*task_)(void*) = nullptr;
  void* data_ = nullptr;
  int running_ = -1;
  double begun_ = 0;  // when the running thread's clock was started
  bool ended_ = false;
};

thread_local SimulatedTeam* SimulatedTeam::current = nullptr;

SimulatedTeam* team = nullptr;

}  // namespace

void (*between_pieces)() = nullptr;

void simulate_team(int threads) {
  delete team;
  team = threads > 0 ? new SimulatedTeam(threads) : nullptr;
  between_pieces = team != nullptr ? [] { SimulatedTeam::pass(false); } : static_cast<void (*)()>(nullptr);
}

SimulatedTime simulated_time() { return team != nullptr ? team->time() : SimulatedTime(); }
int simulated_threads() { return team != nullptr ? team->size() : 0; }
void run_simulated(int threads, void (*task)(void*), void* data) { team->run(threads, task, data); }
void simulated_wait() { SimulatedTeam::pass(true); }

}  // namespace quire

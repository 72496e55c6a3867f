#define QUIRE_ISA portable
#include "cpu/common/simulated_team.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/common/parallel.h"
#include "cpu/common/threads.h"

namespace quire {
namespace {

constexpr double kWakeSeconds = 3e-6;  // until the others than the caller have begun

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
    std::unique_lock<std::mutex> alone(region_, std::try_to_lock);
    if (!alone.owns_lock()) return task(data);  // and so is a second caller's
    std::unique_lock<std::mutex> lock(mutex_);
    task_ = task, data_ = data;
    for (int number = 0; number < threads; ++number) {
      Place& place = places_[static_cast<size_t>(number)];
      place.clock = place.waited = number == 0 ? 0 : kWakeSeconds;
      place.inside = true;
    }
    running_ = 0;
    work(0, lock);
    places_[0].turn.wait(lock, [this] { return running_ < 0; });
    ++time_.regions;
    double last = 0;
    for (int number = 0; number < threads; ++number) {
      const Place& place = places_[static_cast<size_t>(number)];
      time_.work += place.clock - place.waited;
      last = std::max(last, place.clock);
    }
    time_.last += last;
  }

  // The running thread lets the one go on whose clock is behind; waits: not itself, if there is another.
  // False: the thread is in no region.
  static bool pass(bool waits) {
    SimulatedTeam* team = current;
    if (team == nullptr) return false;
    std::unique_lock<std::mutex> lock(team->mutex_);
    const int own = team->running_;
    team->stop_clock();
    const int next = team->behind(waits ? own : -1);
    if (next < 0) {
      team->start_clock();
      return true;
    }
    if (waits) {  // until then, at least
      Place& place = team->places_[static_cast<size_t>(own)];
      const double left = team->places_[static_cast<size_t>(next)].clock - place.clock;
      if (left > 0) place.clock += left, place.waited += left;
    }
    team->hand_over(next);
    team->places_[static_cast<size_t>(own)].turn.wait(lock, [&] { return team->running_ == own; });
    team->start_clock();
    return true;
  }

 private:
  struct Place {
    double clock = 0;     // seconds, in this region
    double waited = 0;    // of these
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

  std::mutex region_;  // held by the caller of the region that runs
  std::mutex mutex_;   // of all below
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
  if (threads < 0 || threads > kMostSimulated)
    throw std::invalid_argument("a team of 0 to " + std::to_string(kMostSimulated) + " threads can be simulated, not " +
                                std::to_string(threads));
  delete team;
  team = nullptr, between_pieces = nullptr;
  if (threads == 0) return;
  team = new SimulatedTeam(threads);
  between_pieces = [] { SimulatedTeam::pass(false); };
}

SimulatedTime simulated_time() { return team != nullptr ? team->time() : SimulatedTime(); }
int simulated_threads() { return team != nullptr ? team->size() : 0; }
void run_simulated(int threads, void (*task)(void*), void* data) { team->run(threads, task, data); }
bool simulated_wait() { return SimulatedTeam::pass(true); }

}  // namespace quire

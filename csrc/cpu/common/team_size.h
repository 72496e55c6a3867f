// Whether a recorded run of calls is worth a team of threads, found out by timing it.
//
// A small model's step gains little from a second thread, and beside busy processes it loses much: the thread that gives
// the tasks waits for a helper that has no core. How many threads run changes no result, so the choice may be made anew
// at any time: the other way is tried now and then, more rarely the more the last trial has cost, and soon where a
// team has become slower than it was.
#pragma once

namespace quire {

class TeamSize {
 public:
  // Whether the next run is made by the calling thread alone.
  bool alone() const { return alone_ != trying_; }
  // Whether `took` wants to know how long the calling thread had a core: in short runs asking would cost too much.
  bool asks_for_core_time() const { return mean_ >= kShort; }

  // The run took so many seconds; for so many of them the calling thread had a core.
  void took(double seconds, double on_core) {
    if (trying_) return tried(seconds);
    mean_ = mean_ > 0 ? mean_ + (seconds - mean_) / kMemory : seconds;
    if (seconds > 0) share_ += (on_core / seconds - share_) / kMemory;
    since_ += seconds;
    const bool worth = alone_ || mean_ < kShort || usual_ < kShort || share_ < kCrowded;
    const bool slower = !alone_ && mean_ > kSlower * usual_ && since_ > kSoon;
    if (worth && (since_ > wait_ || slower)) trying_ = true, runs_ = 0, seconds_ = 0;
  }

 private:
  static constexpr double kMemory = 16;     // runs that the means look back on, about
  static constexpr double kShort = 1e-3;    // seconds; longer runs are worth a team wherever there are free cores
  static constexpr double kCrowded = 0.9;   // a smaller share of a core: others want it too
  static constexpr double kTrial = 20e-3;   // seconds; a busy process keeps a core for some milliseconds at a time
  static constexpr int kLeastRuns = 4;      // of a trial
  static constexpr double kHopeless = 1.4;  // times as long as the usual way: a trial ends early
  static constexpr double kWorthLeaving = 0.95,
                          kWorthAsking = 0.98;           // of the usual way's time: a team is left, or asked for
  static constexpr double kCost = 0.01;                  // of the time may be lost by trials
  static constexpr double kFirst = 0.3;                  // seconds of runs before the first trial
  static constexpr double kAgain = 0.5;                  // between trials at least
  static constexpr double kSoon = 0.03, kSlower = 1.25;  // but soon where a team takes so many times what it did

  void tried(double seconds) {
    ++runs_, seconds_ += seconds;
    const double expected = runs_ * mean_;
    const bool hopeless = runs_ >= kLeastRuns && seconds_ > kHopeless * expected;
    if (!hopeless && (runs_ < kLeastRuns || seconds_ < kTrial)) return;
    const double lost = seconds_ - expected;
    wait_ = lost > kAgain * kCost ? lost / kCost : kAgain;
    if (seconds_ < (alone_ ? kWorthAsking : kWorthLeaving) * expected)
      alone_ = !alone_, mean_ = seconds_ / runs_, share_ = 1;
    trying_ = false, since_ = 0, usual_ = mean_;
  }

  bool alone_ = false;                // the way that was the better one so far
  bool trying_ = false;               // the other one
  double mean_ = 0, usual_ = 1e9;     // seconds of a run; those after the last trial
  double share_ = 1;                  // of a core that the calling thread had
  double since_ = 0, wait_ = kFirst;  // seconds of runs since the last trial, and until the next
  double seconds_ = 0;                // of the trial
  int runs_ = 0;                      // in the trial
};

}  // namespace quire

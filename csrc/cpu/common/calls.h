// What the functions of the Python module quire.kernels._C share. They know nothing of torch: they take addresses,
// shapes and strides, which kernels/native.py, their only caller, has checked.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <vector>

#include "cpu/common/isa.h"
#include "cpu/common/team_size.h"
#include "cpu/common/threads.h"

namespace py = pybind11;

namespace quire {

extern const Isa* current;  // the instruction set in use

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// How large a step is. wanted: of how many tokens somebody wants to know what the last layer makes; 0: of all.
struct StepSize {
  int64_t tokens = 0, sequences = 0, wanted = 0;
};

// What a call is about: rows, of which each token, or each that is wanted, has one or several. sequences: 0 where it
// looks at rows alone.
struct Extent {
  int64_t rows, sequences = 0;
};

// Kernel calls, each with its checks, to be made again at the same addresses: what Python did between them is not
// repeated. kernels/recording.py sees to it that nothing but kernels computed anything, and that the memory stays.
class Recording {
 public:
  ~Recording() {
    if (current_ == this) current_ = nullptr;
  }
  void begin() { begin(StepSize{}); }
  // To record calls that are all about a step's tokens, without making them: a replay may be about less than `most`. Its
  // numbers of tokens are primes, so that what is not about them has hardly a number of rows that is a multiple.
  void begin(const StepSize& most) {
    if (current_) throw std::runtime_error("this thread is recording already");
    current_ = this, most_ = most, teams_ = teams_asked_for();
  }
  static void end() {
    if (!current_) return;
    current_->teams_ = teams_asked_for() - current_->teams_;
    current_ = nullptr;
  }
  void replay() {
    py::gil_scoped_release release;
    const auto all = [](void* data) {
      for (const auto& call : static_cast<const Recording*>(data)->calls_) call();
    };
    if (teams_ <= 1 || max_threads() <= 1) return all(this);
    const bool asks = team_size_.asks_for_core_time();
    const double core = asks ? core_seconds() : 0;
    const auto begin = std::chrono::steady_clock::now();
    if (team_size_.alone())
      keep_alone(all, this);
    else
      keep_team(all, this);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    team_size_.took(seconds, asks ? core_seconds() - core : seconds);
  }
  void replay(const StepSize& now) {
    if (!sizable_) throw std::invalid_argument("some call is not about the step's tokens");
    const auto fits = [](int64_t own, int64_t most) { return own >= 1 && own <= most; };
    if (!fits(now.tokens, most_.tokens) || !fits(now.sequences, most_.sequences) ||
        (most_.wanted ? !fits(now.wanted, most_.wanted) : now.wanted != 0))
      throw std::invalid_argument("more of a step than was recorded, or none");
    py::gil_scoped_release release;
    for (const auto& call : sizable_calls_) call(now);
  }
  size_t size() const { return calls_.size() + sizable_calls_.size(); }
  // Whether `replay` may be about less.
  bool sizable() const { return sizable_ && most_.tokens > 0; }

  // Whether the call is to be made now.
  template <class Call>
  static bool add(const Call& call) {
    if (!current_) return true;
    current_->calls_.emplace_back(call);
    current_->sizable_ = false;
    return current_->most_.tokens == 0;
  }
  template <class Call>
  static bool add(const Extent& extent, const Call& call) {
    if (!current_) return true;
    const StepSize& most = current_->most_;
    if (most.tokens == 0) return add([call, extent] { call(extent); });
    const bool of_all = extent.rows % most.tokens == 0, of_wanted = most.wanted && extent.rows % most.wanted == 0;
    const int64_t each = extent.rows / (of_all ? most.tokens : of_wanted ? most.wanted : 1);
    current_->sizable_calls_.emplace_back([call, each, of_all](const StepSize& now) {
      call(Extent{each * (of_all ? now.tokens : now.wanted), now.sequences});
    });
    if (extent.rows == 0 || !(of_all || of_wanted) || (extent.sequences && extent.sequences != most.sequences))
      current_->sizable_ = false;
    return false;
  }

 private:
  static thread_local Recording* current_;
  std::vector<std::function<void()>> calls_;
  std::vector<std::function<void(const StepSize&)>> sizable_calls_;
  StepSize most_;
  bool sizable_ = true;
  TeamSize team_size_;
  int64_t teams_ = 0;  // that the calls asked for when they were recorded
};
inline thread_local Recording* Recording::current_ = nullptr;

// Releasing the interpreter lock costs about what a microsecond of work does; short calls keep it.
template <class Call>
void make_now(const Call& call, int64_t work) {
  if (work < (1 << 16)) return call();
  py::gil_scoped_release release;
  call();
}
template <class Call>
void make(const Call& call, int64_t work) {
  if (Recording::add(call)) make_now(call, work);
}
// call: is given the extent, or a lesser one by a replay.
template <class Call>
void make(const Extent& extent, const Call& call, int64_t work) {
  if (Recording::add(extent, call)) make_now([&] { call(extent); }, work);
}

// The arguments of a call about fewer tokens.
template <class Args>
Args about(const Extent& extent, Args args) {
  args.tokens = extent.rows;
  return args;
}

// Products of rows: segments of adapters are of certain tokens, so that with some the call is about no fewer.
template <class Call>
void make_linear(int64_t rows, int64_t num_segments, const Call& call, int64_t work) {
  const Extent extent{rows};
  if (num_segments > 0) return make([=] { call(extent); }, work);
  make(extent, call, work);
}

// The items of a flat tuple of whole numbers.
class Numbers {
 public:
  explicit Numbers(const py::tuple& tuple) : tuple_(tuple.ptr()) {}
  size_t size() const { return PyTuple_GET_SIZE(tuple_); }
  int64_t operator[](size_t i) const { return PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple_, i)); }

 private:
  PyObject* tuple_;
};

inline void check_segments(const LoraSegment* segments, int64_t count, int64_t tokens,
                           const std::vector<LoraTable>& tables) {
  int64_t start = 0, end = 0;
  for (const LoraSegment* segment = segments; segment < segments + count; ++segment) {
    if (segment->end <= segment->start) continue;
    if (segment->start < 0 || segment->end > tokens)
      throw py::index_error("segments: a segment is outside the rows of x");
    const bool again = segment->start == start && segment->end == end;
    if (!again && segment->start < end) throw py::value_error("segments: must be ordered, or name the same rows again");
    start = segment->start, end = segment->end;
    for (const LoraTable& table : tables)
      if (table.entries && (segment->slot < 0 || segment->slot >= table.slots))
        throw py::index_error("segments: a slot is outside a weight's table");
  }
}

// Each folder's functions, made known to the module.
void bind_experts(py::module_& module);
void bind_linear(py::module_& module);
void bind_quantized(py::module_& module);
void bind_states(py::module_& module);

}  // namespace quire

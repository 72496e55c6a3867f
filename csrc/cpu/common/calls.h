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

// Kernel calls, each with its checks, to be made again at the same addresses: what Python did between them is not
// repeated. kernels/recording.py sees to it that nothing but kernels computed anything, and that the memory stays.
class Recording {
 public:
  void begin() {
    if (current_) throw std::runtime_error("this thread is recording already");
    current_ = this, teams_ = teams_asked_for();
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
  size_t size() const { return calls_.size(); }

  template <class Call>
  static void add(const Call& call) {
    if (current_) current_->calls_.emplace_back(call);
  }

 private:
  static thread_local Recording* current_;
  std::vector<std::function<void()>> calls_;
  TeamSize team_size_;
  int64_t teams_ = 0;  // that the calls asked for when they were recorded
};
inline thread_local Recording* Recording::current_ = nullptr;

// Releasing the interpreter lock costs about what a microsecond of work does; short calls keep it.
template <class Call>
void make(const Call& call, int64_t work) {
  Recording::add(call);
  if (work < (1 << 16)) return call();
  py::gil_scoped_release release;
  call();
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
void bind_quantized(py::module_& module);
void bind_states(py::module_& module);

}  // namespace quire

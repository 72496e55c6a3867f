#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "cuda/common/device.h"

namespace quire::emulator {

Position position;

namespace {

constexpr size_t kStack = 256 << 10;

// -- fibers: a stack each, and a switch that saves what the calling convention asks for -------------------------------

#if defined(__x86_64__)
extern "C" void quire_switch(void** save, void* load);
asm(R"(
.text
.globl quire_switch
.hidden quire_switch
.type quire_switch,@function
quire_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size quire_switch,.-quire_switch
)");

struct Context {
  void* top = nullptr;
  void prepare(char* stack, void (*entry)()) {
    auto* slot = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(stack + kStack) & ~uintptr_t{15});
    *--slot = 0;  // where `entry` would return to: it never does
    *--slot = reinterpret_cast<uintptr_t>(entry);
    for (int i = 0; i < 6; ++i) *--slot = 0;
    top = slot;
  }
};
void switch_context(Context& from, Context& to) { quire_switch(&from.top, to.top); }
#else
struct Context {
  ucontext_t state;
  void prepare(char* stack, void (*entry)()) {
    getcontext(&state);
    state.uc_stack.ss_sp = stack;
    state.uc_stack.ss_size = kStack;
    state.uc_link = nullptr;
    makecontext(&state, entry, 0);
  }
};
void switch_context(Context& from, Context& to) { swapcontext(&from.state, &to.state); }
#endif

struct Copy {
  void* to;
  char bytes[16];
  const void* from;
  int size;
  bool valid;
  int group;
};

struct Thread {
  Context context;
  char* stack = nullptr;
  Position position;
  bool finished = false;
  const int64_t* waits = nullptr;  // runs again once *waits > since
  int64_t since = 0;
  int64_t exchanges = 0;
  std::vector<Copy> copies;
  int group = 0;
};

struct Warp {
  char slots[2][32 * 64];
  int64_t arrived[2] = {0, 0};
  int64_t completed = 0;  // exchanges
};

Context scheduler;
Thread* current = nullptr;
const std::function<void()>* body = nullptr;
std::vector<std::unique_ptr<Thread>> threads;
std::vector<Warp> warps;
int64_t barrier_arrived = 0, barrier_passed = 0, live = 0;
char* shared = nullptr;
bool late_copies = false;

void entry() {
  (*body)();
  current->finished = true;
  --live;
  if (barrier_arrived && barrier_arrived == live) {
    barrier_arrived = 0;
    ++barrier_passed;
  }
  switch_context(current->context, scheduler);
}

void wait_beyond(const int64_t* counter, int64_t since) {
  current->waits = counter;
  current->since = since;
  switch_context(current->context, scheduler);
}

bool resume(Thread& thread) {
  if (thread.finished || (thread.waits && *thread.waits <= thread.since)) return false;
  thread.waits = nullptr;
  current = &thread;
  position = thread.position;
  switch_context(scheduler, thread.context);
  return true;
}

// Dynamic shared memory that ends where a page begins that cannot be touched.
class Shared {
 public:
  explicit Shared(size_t size) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    size_ = (size + 127) / 128 * 128;
    const size_t room = (size_ + page - 1) / page * page;
    mapped_ = room + page;
    base_ = static_cast<char*>(mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (base_ == MAP_FAILED) throw std::runtime_error("no memory for a block's shared memory");
    mprotect(base_ + room, page, PROT_NONE);
    start_ = base_ + room - size_;
  }
  ~Shared() { munmap(base_, mapped_); }
  Shared(const Shared&) = delete;
  char* begin() {
    memset(start_, 0xff, size_);  // NaN in every type
    return start_;
  }

 private:
  char *base_, *start_;
  size_t size_, mapped_;
};

void make_copy(const Copy& copy) {
  if (copy.valid) {
    memcpy(copy.to, copy.from, static_cast<size_t>(copy.size));
  } else {
    memset(copy.to, 0, static_cast<size_t>(copy.size));
  }
}

}  // namespace

char* shared_memory() { return shared; }

void synchronize_block() {
  const int64_t since = barrier_passed;
  if (++barrier_arrived == live) {
    barrier_arrived = 0;
    ++barrier_passed;
  } else {
    wait_beyond(&barrier_passed, since);
  }
}

const char* exchange(const void* own, size_t size) {
  const Position& p = position;
  const unsigned thread = p.thread.x + p.block_size.x * (p.thread.y + p.block_size.y * p.thread.z);
  Warp& warp = warps[thread / 32];
  const int64_t number = current->exchanges++;
  char* slots = warp.slots[number % 2];
  memcpy(slots + 64 * (thread % 32), own, size);
  if (++warp.arrived[number % 2] == 32) {
    warp.arrived[number % 2] = 0;
    ++warp.completed;
  } else {
    wait_beyond(&warp.completed, number);
  }
  return slots;
}

void copy_async(void* to, const void* from, int bytes, bool valid) {
  if (reinterpret_cast<uintptr_t>(to) % 16 || (valid && reinterpret_cast<uintptr_t>(from) % 16))
    __builtin_trap();  // as a GPU does
  const Copy copy{to, {}, from, bytes, valid, current->group};
  if (late_copies) {
    current->copies.push_back(copy);
  } else {
    make_copy(copy);
  }
}

void copy_async_commit() { ++current->group; }

void copy_async_wait(int groups) {
  auto& copies = current->copies;
  size_t done = 0;
  while (done < copies.size() && copies[done].group < current->group - groups) make_copy(copies[done++]);
  copies.erase(copies.begin(), copies.begin() + static_cast<std::ptrdiff_t>(done));
}

void run(dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& function) {
  const size_t count = size_t{block.x} * block.y * block.z;
  if (count == 0 || count > 1024 || count % 32)
    throw std::runtime_error("a block must have 32 to 1024 threads, in whole warps");
  if (grid.y > 65535 || grid.z > 65535) throw std::runtime_error("a grid's second and third size are at most 65535");
  if (shared_bytes > 227 * 1024) throw std::runtime_error("a block has at most 227 KB of shared memory");
  const char* text = getenv("QUIRE_EMULATOR_SEED");
  const unsigned seed = text ? static_cast<unsigned>(atoi(text)) : 0;
  late_copies = seed % 2 == 0;
  const bool backwards = seed / 2 % 2;
  while (threads.size() < count) {
    threads.push_back(std::make_unique<Thread>());
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED) throw std::runtime_error("no memory for a thread's stack");
    threads.back()->stack = static_cast<char*>(stack);
  }
  Shared memory(shared_bytes);
  body = &function;
  const size_t num_warps = count / 32;
  const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y * grid.z;
  for (int64_t step = 0; step < blocks; ++step) {
    const int64_t b = backwards ? blocks - 1 - step : step;
    const dim3 index(static_cast<unsigned>(b % grid.x), static_cast<unsigned>(b / grid.x % grid.y),
                     static_cast<unsigned>(b / grid.x / grid.y));
    shared = memory.begin();
    warps.assign(num_warps, Warp());
    barrier_arrived = barrier_passed = 0;
    live = static_cast<int64_t>(count);
    for (size_t i = 0; i < count; ++i) {
      Thread& thread = *threads[i];
      const dim3 place(static_cast<unsigned>(i % block.x), static_cast<unsigned>(i / block.x % block.y),
                       static_cast<unsigned>(i / block.x / block.y));
      thread.position = {place, index, block, grid};
      thread.finished = false;
      thread.waits = nullptr;
      thread.exchanges = 0;
      thread.copies.clear();
      thread.group = 0;
      thread.context.prepare(thread.stack, &entry);
    }
    while (live) {
      bool moved = false;
      for (size_t w = 0; w < num_warps; ++w) {
        const size_t warp = backwards ? num_warps - 1 - w : w;
        for (bool again = true; again;) {
          again = false;
          for (size_t lane = 0; lane < 32; ++lane) again |= resume(*threads[32 * warp + lane]);
          moved |= again;
        }
      }
      if (!moved && live) throw std::runtime_error("a kernel hangs: some threads of a block never reach a barrier");
    }
  }
}

}  // namespace quire::emulator

namespace quire::cuda {

float to_float(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

float to_float(f16 x) {
  _Float16 y;
  memcpy(&y, &x, 2);
  return static_cast<float>(y);
}

template <>
float from_float<float>(float x) {
  return x;
}
template <>
bf16 from_float<bf16>(float x) {
  if (x != x) return {0x7fff};
  const uint32_t bits = __float_as_uint(x);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
f16 from_float<f16>(float x) {
  const auto y = static_cast<_Float16>(x);
  f16 z;
  memcpy(&z, &y, 2);
  return z;
}

template <class T>
uint32_t pack2(float low, float high) {
  return from_float<T>(low).bits | static_cast<uint32_t>(from_float<T>(high).bits) << 16;
}
template uint32_t pack2<bf16>(float, float);
template uint32_t pack2<f16>(float, float);

template <class T>
void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Operands {
    uint32_t a[4], b[2];
  } own;
  memcpy(own.a, a, sizeof own.a);
  memcpy(own.b, b, sizeof own.b);
  const char* all = emulator::exchange(&own, sizeof own);
  const int lane = emulator::lane(), group = lane / 4, pair = lane % 4;
  const auto element = [](uint32_t word, int half) {
    return to_float(T{static_cast<uint16_t>(half ? word >> 16 : word)});
  };
  float sums[4] = {c[0], c[1], c[2], c[3]};
  for (int k = 0; k < 16; ++k) {
    const int t = k % 8 / 2;
    Operands row, columns[2];
    memcpy(&row, all + 64 * (4 * group + t), sizeof row);
    for (int n = 0; n < 2; ++n) memcpy(&columns[n], all + 64 * (4 * (2 * pair + n) + t), sizeof row);
    for (int i = 0; i < 4; ++i)
      sums[i] += element(row.a[2 * (k / 8) + i / 2], k % 2) * element(columns[i % 2].b[k / 8], k % 2);
  }
  memcpy(c, sums, sizeof sums);
}
template void mma<bf16>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);
template void mma<f16>(float (&)[4], const uint32_t (&)[4], const uint32_t (&)[2]);

namespace {
void load_matrices(uint32_t (&out)[4], const void* row, bool transposed) {
  if (reinterpret_cast<uintptr_t>(row) % 16) __builtin_trap();
  struct Row {
    uint16_t elements[8];
  } own;
  memcpy(&own, row, sizeof own);
  const char* all = emulator::exchange(&own, sizeof own);
  const int lane = emulator::lane();
  for (int i = 0; i < 4; ++i) {
    uint16_t pair[2];
    for (int j = 0; j < 2; ++j) {
      const int r = transposed ? 2 * (lane % 4) + j : lane / 4, column = transposed ? lane / 4 : 2 * (lane % 4) + j;
      Row found;
      memcpy(&found, all + 64 * (8 * i + r), sizeof found);
      pair[j] = found.elements[column];
    }
    out[i] = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  }
}
}  // namespace

void ldmatrix4(uint32_t (&out)[4], const void* row) { load_matrices(out, row, false); }
void ldmatrix4_transposed(uint32_t (&out)[4], const void* row) { load_matrices(out, row, true); }

}  // namespace quire::cuda

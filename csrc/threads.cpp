#include "threads.h"

#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr int kSpins = 2000;  // some 50 us: longer than a gap between two products, shorter than one between passes

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Each thread has its own rounding and denormal mode; torch may have changed the caller's.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

}  // namespace

Threads::Threads(int count) : owner_(getpid()) {
  for (int index = 1; index < count; ++index) workers_.emplace_back([this, index] { work(index); });
}

Threads::~Threads() {
  if (getpid() != owner_) {
    // A forked child has none of these threads, and their ids may be its own threads' by now: they are left alone.
    new std::vector<std::thread>(std::move(workers_));
    return;
  }
  is_stopping_ = true;
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void Threads::run(const std::function<void(int, int)>& body) {
  const std::lock_guard<std::mutex> lock(one_caller_);
  const DefaultFloatMode mode;
  running_ = getpid() == owner_ ? count() : 1;
  if (running_ == 1) {
    body(0, 1);
    return;
  }
  body_ = &body;
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  body(0, running_);
  barrier();
}

void Threads::barrier() {
  if (running_ == 1) return;
  const uint32_t phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == running_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (spins < kSpins)
      pause_briefly();
    else
      sched_yield();  // somebody else has the other core
  }
}

void Threads::work(int index) {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; spins < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spins) pause_briefly();
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (is_stopping_) return;
    const DefaultFloatMode mode;
    (*body_)(index, running_);
    barrier();
  }
}

}  // namespace paceline

#include "threads.h"

#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace paceline {
namespace {

constexpr int kSpins = 2000;  // some 50 us: longer than a gap between two products, shorter than one between passes

constexpr int kShut = 1 << 30;

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

void relax(int num_steps) {
  if (num_steps >= kSpins) {
    sched_yield();  // somebody else has the other core
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

Threads::Threads(int count) : owner_(getpid()), door_(kShut) {
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

void Threads::run(const std::function<void(int)>& body) {
  const std::lock_guard<std::mutex> lock(one_caller_);
  const DefaultFloatMode mode;
  if (workers_.empty() || getpid() != owner_) {
    body(0);
    return;
  }
  body_ = &body;
  door_.fetch_and(~kShut, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  body(0);
  door_.fetch_or(kShut, std::memory_order_relaxed);
  wait_until([&] { return door_.load(std::memory_order_acquire) == kShut; });
}

void Threads::work(int index) {
  uint32_t seen = 0;
  while (true) {
    for (int spins = 0; spins < kSpins && epoch_.load(std::memory_order_acquire) == seen; ++spins) relax(spins);
    epoch_.wait(seen, std::memory_order_acquire);
    seen = epoch_.load(std::memory_order_acquire);
    if (is_stopping_) return;
    const bool is_open = (door_.fetch_add(1, std::memory_order_acquire) & kShut) == 0;
    if (is_open) {
      const DefaultFloatMode mode;
      (*body_)(index);
    }
    door_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace paceline

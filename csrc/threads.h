// The threads of one engine: the caller and `count - 1` workers that sleep between forward passes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace paceline {

// One step of waiting: a pause at first, then the core is offered to others.
void relax(int num_steps);

// Waits until `is_done` holds, which another thread brings about.
template <typename Condition>
void wait_until(Condition is_done) {
  for (int spins = 0; !is_done(); ++spins) relax(spins);
}

// Work that must be complete before the next begins, in parts that threads take as they come: every other thread from the
// end, so that what it wrote in one stage it mostly reads itself in the next. Nobody waits for a thread that the system
// has set aside, only for parts that are not done: on a core with other work a thread takes fewer parts, or none, and
// catches up through stages that are over.
class alignas(64) Stage {
 public:
  // Calls body(part) for the parts of [0, num_parts) that this thread gets; returns when all are done, whoever did them.
  template <typename Body>
  void share(int num_parts, int thread, Body body) {
    const bool is_from_end = thread % 2 == 1;
    int num_mine = 0;
    for (;; ++num_mine) {
      const uint64_t taken = taken_.fetch_add(is_from_end ? kOneFromEnd : 1, std::memory_order_relaxed);
      const int from_start = static_cast<int>(taken % kOneFromEnd), from_end = static_cast<int>(taken / kOneFromEnd);
      if (from_start + from_end >= num_parts) break;
      body(is_from_end ? num_parts - 1 - from_end : from_start);
    }
    if (num_mine > 0) num_done_.fetch_add(num_mine, std::memory_order_acq_rel);
    wait_until([&] { return num_done_.load(std::memory_order_acquire) == num_parts; });
  }

 private:
  static constexpr uint64_t kOneFromEnd = uint64_t{1} << 32;
  std::atomic<uint64_t> taken_{0};  // from the start, and from the end in the upper half
  std::atomic<int> num_done_{0};
};

class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(0) on this thread, and body(index) on every worker that comes before this one is through: all must share
  // the same stages. Returns when none is inside. One caller at a time: a second waits.
  void run(const std::function<void(int)>& body);

 private:
  void work(int index);

  std::vector<std::thread> workers_;
  std::mutex one_caller_;
  const std::function<void(int)>* body_ = nullptr;
  bool is_stopping_ = false;
  int owner_;  // the process that made the workers; a fork has none of them
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> door_;  // workers inside, and whether it is shut
};

// The part [first, last) of `total` things that is number `index` of `count`.
struct Part {
  int first;
  int last;
};
inline Part part_of(int total, int index, int count) {
  return {static_cast<int>(static_cast<int64_t>(total) * index / count),
          static_cast<int>(static_cast<int64_t>(total) * (index + 1) / count)};
}

// Calls body(first, last) for ranges of [0, total), two for each thread, so that threads end together.
template <typename Body>
void share_ranges(Stage& stage, int total, int num_threads, int thread, Body body) {
  const int num_parts = std::min(total, 2 * num_threads);
  stage.share(num_parts, thread, [&](int part) {
    const Part range = part_of(total, part, num_parts);
    body(range.first, range.last);
  });
}

}  // namespace paceline

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

// Work that must be complete before the next begins, in parts that threads take as they come. Nobody waits for a thread
// that the system has set aside, only for parts that are not done: on a core with other work a thread takes fewer parts,
// or none, and catches up through stages that are over.
class alignas(64) Stage {
 public:
  // Calls body(part) for the parts of [0, num_parts) that this thread gets; returns when all are done, whoever did them.
  template <typename Body>
  void share(int num_parts, Body body) {
    int num_mine = 0;
    for (int part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < num_parts; ++num_mine) body(part);
    if (num_mine > 0) num_done_.fetch_add(num_mine, std::memory_order_acq_rel);
    wait_until([&] { return num_done_.load(std::memory_order_acquire) == num_parts; });
  }

 private:
  std::atomic<int> next_{0};
  std::atomic<int> num_done_{0};
};

class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body on this thread, and on every worker that comes before this one is through: all must share the same stages.
  // Returns when none is inside. One caller at a time: a second waits.
  void run(const std::function<void()>& body);

 private:
  void work();

  std::vector<std::thread> workers_;
  std::mutex one_caller_;
  const std::function<void()>* body_ = nullptr;
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

// Calls body(first, last) for ranges of [0, total): some more than there are threads, so that they end together.
template <typename Body>
void share_ranges(Stage& stage, int total, int num_threads, Body body) {
  const int num_parts = std::min(total, 4 * num_threads);
  stage.share(num_parts, [&](int part) {
    const Part range = part_of(total, part, num_parts);
    body(range.first, range.last);
  });
}

}  // namespace paceline

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

class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(index, count) on every thread and returns when all are done. One caller at a time: a second waits.
  void run(const std::function<void(int, int)>& body);

  // Waits until every thread of the running body is here.
  void barrier();

 private:
  void work(int index);

  std::vector<std::thread> workers_;
  std::mutex one_caller_;
  const std::function<void(int, int)>* body_ = nullptr;
  int running_ = 1;  // threads that take part in the running body
  bool is_stopping_ = false;
  int owner_;  // the process that made the workers; a fork has none of them
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

// The part [first, second) of `total` things that thread `index` of `count` does.
struct Part {
  int first;
  int last;
};
inline Part part_of(int total, int index, int count) {
  return {static_cast<int>(static_cast<int64_t>(total) * index / count),
          static_cast<int>(static_cast<int64_t>(total) * (index + 1) / count)};
}

// Calls body(first, last) for parts of [0, total) that `count` threads take as they come: a core that has other work too
// takes fewer. The threads share `next`, which starts at 0.
template <typename Body>
void take_parts(std::atomic<int>& next, int total, int count, Body body) {
  const int size = std::max(1, total / (4 * count));
  for (int first; (first = next.fetch_add(size, std::memory_order_relaxed)) < total;)
    body(first, std::min(first + size, total));
}

}  // namespace paceline

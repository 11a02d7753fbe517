// Weights and K/V in the layouts that the kernels read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"

namespace paceline {

// Memory of its own, not zeroed, aligned for whole cache lines and, where large, on huge pages.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  uint8_t* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

// Room for the weights of a model, one after the other, so that small ones share huge pages: with pages of 4 kB a pass
// spends a tenth of its time on finding them.
class WeightMemory {
 public:
  // Zeroed; kept by whoever holds it.
  std::shared_ptr<uint8_t> take(size_t bytes);

 private:
  std::mutex one_caller_;
  std::shared_ptr<Buffer> chunk_;
  size_t used_ = 0;
};

class Weight {
 public:
  // codes [num_outputs, num_inputs] below 2^bits; scales and minima [num_outputs, ceil(num_inputs / 32)].
  static Weight quantised(WeightMemory& memory, int bits, int num_outputs, int num_inputs, const uint8_t* codes,
                          const float* scales, const float* minima);
  static Weight bf16(WeightMemory& memory, int num_outputs, int num_inputs, const float* values);

  const Panels& panels() const { return panels_; }
  bool is_quantised() const { return panels_.format != Format::kBf16; }

 private:
  Weight(WeightMemory& memory, Format format, int num_outputs, int num_inputs);

  std::shared_ptr<uint8_t> data_;
  Panels panels_{};
};

// Keys and values of all layers in 16 bits (bf16) or 8; zero until written, and taken from the system only as they are.
class KVStore {
 public:
  KVStore(int num_layers, int64_t num_slots, int num_heads, int head_dim, int bits);
  KV layer(int index) const;
  bool has(int layer) const { return layer >= 0 && layer < num_layers_; }
  int64_t num_slots() const { return num_slots_; }

 private:
  struct Free {
    void operator()(void* p) const;
  };
  int num_layers_, num_heads_, head_dim_, width_;
  int64_t num_slots_;  // rounded up to whole tiles
  int bytes_;          // of a number
  std::unique_ptr<uint8_t, Free> numbers_;
  std::unique_ptr<float, Free> scales_;  // none for bf16
};

}  // namespace paceline

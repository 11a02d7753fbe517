#include "weight.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace paceline {
namespace {

constexpr size_t kHugePage = size_t{1} << 21;
constexpr size_t kChunkBytes = size_t{1} << 25;

// To nearest, ties to even, in one rounding; beyond the largest half it is infinite.
uint16_t to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) {  // subnormal as a half: a whole number of 2^-24, which is what 0.5 + x is rounded to
    float small = std::abs(x);
    small += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &small, 4);
    return static_cast<uint16_t>(sign | (rounded - 0x3f000000));
  }
  const uint32_t rounded = (magnitude + 0xfff + ((magnitude >> 13) & 1) - 0x38000000) >> 13;
  return static_cast<uint16_t>(sign | (rounded > 0x7c00 ? 0x7c00 : rounded));
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

void Buffer::Free::operator()(uint8_t* p) const { std::free(p); }

Buffer::Buffer(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  size_ = (bytes + alignment - 1) / alignment * alignment;
  auto* p = static_cast<uint8_t*>(std::aligned_alloc(alignment, size_));
  if (p == nullptr) throw std::bad_alloc();
  data_.reset(p);
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(p, size_, MADV_HUGEPAGE);
#endif
}

std::shared_ptr<uint8_t> WeightMemory::take(size_t bytes) {
  const std::lock_guard<std::mutex> lock(one_caller_);
  if (chunk_ == nullptr || chunk_->size() - used_ < bytes) {
    chunk_ = std::make_shared<Buffer>(bytes > kChunkBytes ? bytes : kChunkBytes);
    used_ = 0;
  }
  std::shared_ptr<uint8_t> piece(chunk_, chunk_->data() + used_);
  std::memset(piece.get(), 0, bytes);
  used_ += (bytes + 63) / 64 * 64;
  return piece;
}

Weight::Weight(WeightMemory& memory, Format format, int num_outputs, int num_inputs) {
  panels_ = {format, num_outputs, num_inputs, (num_inputs + kGroup - 1) / kGroup, nullptr};
  data_ = memory.take(static_cast<size_t>(panels_.panel_bytes() * panels_.num_panels()));
  panels_.data = data_.get();
}

Weight Weight::quantised(WeightMemory& memory, int bits, int num_outputs, int num_inputs, const uint8_t* codes,
                         const float* scales, const float* minima) {
  Weight weight(memory, bits == 4 ? Format::kInt4 : Format::kInt8, num_outputs, num_inputs);
  const int num_groups = weight.panels_.num_groups;
  const int64_t group_bytes = 4 * kPanel + kGroup * kPanel * bits / 8;
  for (int output = 0; output < num_outputs; ++output) {
    const int lane = output % kPanel;
    uint8_t* panel = weight.data_.get() + weight.panels_.panel_bytes() * (output / kPanel);
    const uint8_t* row = codes + static_cast<int64_t>(output) * num_inputs;
    for (int g = 0; g < num_groups; ++g, panel += group_bytes) {
      auto* halves = reinterpret_cast<uint16_t*>(panel);
      halves[lane] = to_half(scales[static_cast<int64_t>(output) * num_groups + g]);
      halves[kPanel + lane] = to_half(minima[static_cast<int64_t>(output) * num_groups + g]);
      uint8_t* packed = panel + 4 * kPanel + 4 * lane;
      const int n = num_inputs - g * kGroup < kGroup ? num_inputs - g * kGroup : kGroup;
      for (int i = 0; i < n; ++i) {
        const uint8_t code = row[g * kGroup + i];
        if (bits == 8)
          packed[64 * (i / 4) + i % 4] = code;
        else
          packed[64 * (i / 4 % 4) + i % 4] |= static_cast<uint8_t>(i < 16 ? code : code << 4);
      }
    }
  }
  return weight;
}

Weight Weight::bf16(WeightMemory& memory, int num_outputs, int num_inputs, const float* values) {
  Weight weight(memory, Format::kBf16, num_outputs, num_inputs);
  for (int output = 0; output < num_outputs; ++output) {
    auto* pairs =
        reinterpret_cast<uint16_t*>(weight.data_.get() + weight.panels_.panel_bytes() * (output / kPanel));
    const float* row = values + static_cast<int64_t>(output) * num_inputs;
    for (int k = 0; k < num_inputs; ++k) pairs[(k / 2) * 2 * kPanel + 2 * (output % kPanel) + k % 2] = to_bf16(row[k]);
  }
  return weight;
}

void KVStore::Free::operator()(void* p) const { std::free(p); }

KVStore::KVStore(int num_layers, int64_t num_slots, int num_heads, int head_dim, int bits)
    : num_layers_(num_layers),
      num_heads_(num_heads),
      head_dim_(head_dim),
      width_((head_dim + kHeadStep - 1) / kHeadStep * kHeadStep),
      num_slots_((num_slots + kTile - 1) / kTile * kTile),
      bytes_(bits / 8) {
  const size_t num_heads_kept = static_cast<size_t>(2 * num_layers_) * num_slots_ * num_heads_;
  numbers_.reset(static_cast<uint8_t*>(std::calloc(num_heads_kept * width_, bytes_)));
  if (bits == 8) scales_.reset(static_cast<float*>(std::calloc(num_heads_kept, sizeof(float))));
  if (numbers_ == nullptr || (bits == 8 && scales_ == nullptr)) throw std::bad_alloc();
}

KV KVStore::layer(int index) const {
  const int64_t num_heads_kept = num_slots_ * num_heads_, size = num_heads_kept * width_ * bytes_;
  uint8_t* keys = numbers_.get() + 2 * index * size;
  float* key_scales = scales_ == nullptr ? nullptr : scales_.get() + 2 * index * num_heads_kept;
  float* value_scales = scales_ == nullptr ? nullptr : key_scales + num_heads_kept;
  return {keys, keys + size, key_scales, value_scales, num_slots_ / kTile, num_heads_, head_dim_, width_};
}

}  // namespace paceline

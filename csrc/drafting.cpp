#include "drafting.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace paceline {
namespace {

// What a draft head says of the next token.
struct Choice {
  int64_t likeliest;  // of the listed tokens, the first of equals
  double confidence;  // probability of the likeliest logit, the escape included
  bool is_outside;    // the escape is more likely than not
};

Choice choose(const std::vector<float>& logits, int64_t num_listed) {
  constexpr float kNegligible = 20.0f;  // e^-20 of the likeliest, times a few thousand, is nothing
  int64_t best = 0;
  for (int64_t i = 1; i < num_listed; ++i)
    if (logits[i] > logits[best]) best = i;
  const bool has_escape = num_listed < static_cast<int64_t>(logits.size());
  const float most = has_escape ? std::max(logits[best], logits.back()) : logits[best];
  double sum = 0.0;
  for (const float logit : logits)
    if (logit > most - kNegligible) sum += std::exp(logit - most);
  return {best, 1.0 / sum, has_escape && std::exp(logits.back() - most) > 0.5 * sum};
}

// float16 as torch rounds it: to nearest, ties to even. Not every compiler for x86 has a type for it.
float from_half(uint16_t half) {
  // A shifted half is the number times 2^-112 as a float; multiplying by 2^112 also normalises what is subnormal.
  uint32_t bits = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  value *= 0x1p112f;
  return half & 0x8000 ? -value : value;
}
uint16_t to_half(float value) {
  constexpr uint32_t kOverflow = 0x477ff000, kSmallestNormal = 0x38800000, kHalf = 0x3f000000;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= kOverflow) {
    bits = 0x7c00;
  } else if (bits < kSmallestNormal) {  // the sum with 0.5 is rounded where a subnormal half ends
    float sum;
    std::memcpy(&sum, &bits, sizeof(sum));
    sum += 0.5f;
    std::memcpy(&bits, &sum, sizeof(bits));
    bits -= kHalf;
  } else {
    bits = (bits - (112u << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | bits);
}

void load_state(const int16_t* from, float* to, int width) {
  for (int i = 0; i < width; ++i) to[i] = from_half(static_cast<uint16_t>(from[i]));
}
void store_state(const float* from, int16_t* to, int width) {
  for (int i = 0; i < width; ++i) to[i] = static_cast<int16_t>(to_half(from[i]));
}

void require(bool holds, const char* what) {
  if (!holds) throw std::invalid_argument(what);
}

}  // namespace

std::vector<int64_t> draft_greedily(const Kernels& kernels, Threads& threads, const DraftHead& head, KVStore& store,
                                    std::vector<int64_t> token_ids, int64_t start,
                                    const std::vector<int32_t>& block_ids, int block_size, int max_tokens,
                                    const DraftRule& rule) {
  const int width = head.decoder.state_size();
  const int64_t num_listed = static_cast<int64_t>(head.listed.size()), num_logits = head.logits.panels().num_outputs;
  require(width > 0 && head.logits.panels().num_inputs == width, "the decoder is no draft head of this width");
  require(num_listed > 0 && (num_logits == num_listed || num_logits == num_listed + 1), "the head has another vocabulary");
  require(block_size > 0 && start >= 0 && !token_ids.empty() && max_tokens > 0 &&
              start + static_cast<int64_t>(token_ids.size()) + max_tokens - 1 <=
                  static_cast<int64_t>(block_ids.size()) * block_size,
          "the block table is shorter than the draft");
  for (const int32_t block : block_ids)
    require(block >= 0 && (block + int64_t{1}) * block_size <= std::min(store.num_slots(), head.num_slots),
            "a block is out of range");
  const auto slot_of = [&](int64_t position) {
    return static_cast<int64_t>(block_ids[position / block_size]) * block_size + position % block_size;
  };
  std::vector<int64_t> drafted, positions, slots;
  std::vector<float> before, hidden, logits(num_logits);
  while (true) {
    const int n = static_cast<int>(token_ids.size());
    positions.resize(n);
    slots.resize(n);
    before.assign(static_cast<size_t>(n) * width, 0.0f);  // nothing stands before a first token
    hidden.resize(static_cast<size_t>(n) * width);
    for (int i = 0; i < n; ++i) {
      positions[i] = start + i;
      slots[i] = slot_of(start + i);
      if (start + i > 0)
        load_state(head.states + slot_of(start + i - 1) * width, before.data() + static_cast<int64_t>(i) * width, width);
    }
    const Batch batch{n, positions.data(), slots.data(), {{0, n, static_cast<int>(start) + n, block_ids.data()}}, block_size};
    head.decoder.check(token_ids.data(), batch, width, store);
    head.decoder.forward(kernels, threads, store, token_ids.data(), before.data(), batch, hidden.data(), false);
    const float* last = hidden.data() + static_cast<int64_t>(n - 1) * width;
    store_state(last, head.states + slots[n - 1] * width, width);
    multiply(kernels, threads, head.logits, nullptr, last, 1, logits.data());
    const Choice choice = choose(logits, num_listed);
    if ((rule.keeps && !rule.keeps(choice.confidence)) || choice.is_outside) break;
    drafted.push_back(head.listed[choice.likeliest]);
    if (static_cast<int>(drafted.size()) == max_tokens || (rule.wants_more && !rule.wants_more())) break;
    start += n;
    token_ids.assign(1, drafted.back());
  }
  return drafted;
}

}  // namespace paceline

// A draft head's greedy drafts, token after token without leaving native code.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "decoder.h"

namespace paceline {

// See StopRule in paceline/spec/proposer.py; one that is empty ends nothing.
struct DraftRule {
  std::function<bool(double confidence)> keeps;
  std::function<bool()> wants_more;
};

struct DraftHead {
  Decoder& decoder;
  const Weight& logits;         // its rows: the listed tokens, and then perhaps the escape
  std::vector<int64_t> listed;  // the target's ids of the tokens
  int16_t* states;              // float16 [num_slots, decoder.state_size()]; the head's own are left there
  int64_t num_slots;
};

// Reads token_ids, which stand from position `start` on, and drafts at most max_tokens behind them. See
// DraftModelProposer in paceline/spec/draft_model.py, which is the definition. Throws std::invalid_argument where the
// parts do not fit together or the block table is too short.
std::vector<int64_t> draft_greedily(const Kernels& kernels, Threads& threads, const DraftHead& head, KVStore& store,
                                    std::vector<int64_t> token_ids, int64_t start,
                                    const std::vector<int32_t>& block_ids, int block_size, int max_tokens,
                                    const DraftRule& rule);

}  // namespace paceline

#include "decoder.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace paceline {
namespace {

// A sequence with at most this many new tokens has its context split over the threads; longer ones have work enough.
constexpr int kSplitTokens = 32;

constexpr int kStagesPerLayer = 10;  // two norms, four products, rotation, attention, its merging, the gate
constexpr int kOtherStages = 4;      // the embedding, states and their product, the final norm

}  // namespace

float* Scratch::floats(size_t count) {
  if (buffer_.size() < count * sizeof(float)) {
    buffer_ = Buffer(count * sizeof(float));
    std::memset(buffer_.data(), 0, buffer_.size());
  }
  return reinterpret_cast<float*>(buffer_.data());
}

Rows rows_for(const Weight& weight, int num_rows, Scratch& scratch) {
  Rows rows{weight.panels().num_groups, weight.is_quantised(), nullptr};
  const int num_tiles = (num_rows + kRowTile - 1) / kRowTile;
  rows.data = reinterpret_cast<uint8_t*>(scratch.floats(rows.tile_bytes() * num_tiles / sizeof(float)));
  return rows;
}

void multiply(const Kernels& kernels, Threads& threads, const Weight& weight, const float* bias, const float* x,
              int num_rows, float* out) {
  const Panels& panels = weight.panels();
  Scratch scratch;
  const Rows rows = rows_for(weight, num_rows, scratch);
  Stage preparing, multiplying;
  threads.run([&](int thread) {
    share_rows(preparing, num_rows, panels.num_groups, threads.count(), thread, [&](int row, int first, int last) {
      kernels.prepare_row(x + static_cast<int64_t>(row) * panels.num_inputs, panels.num_inputs, rows, row, first, last);
    });
    share_ranges(multiplying, panels.num_panels(), threads.count(), thread, [&](int first, int last) {
      kernels.linear(panels, first, last, rows, num_rows, {out, panels.num_outputs, bias, false});
    });
  });
}

AttentionPlan::AttentionPlan(const Batch& batch, int num_heads, const KV& kv)
    : batch_(batch),
      num_heads_(num_heads),
      num_kv_heads_(kv.num_heads),
      head_dim_(kv.head_dim),
      width_(kv.width),
      group_(num_heads / kv.num_heads),
      first_unit_(batch.num_tokens) {
  const int tokens_per_unit = std::max(1, kMaxQueries / group_);
  int slot = 0;
  for (int s = 0; s < static_cast<int>(batch.sequences.size()); ++s) {
    const Sequence& sequence = batch.sequences[s];
    const bool is_split = sequence.query_len <= kSplitTokens;
    for (int token = 0; token < sequence.query_len; token += tokens_per_unit) {
      const int num_tokens = std::min(tokens_per_unit, sequence.query_len - token);
      for (int i = 0; i < num_tokens; ++i)
        first_unit_[sequence.query_start + token + i] = static_cast<int>(units_.size());
      const int end = sequence.kv_len - sequence.query_len + token + num_tokens;
      const int num_chunks = (end + kChunk - 1) / kChunk, num_slots = is_split ? num_chunks : 1;
      for (int head = 0; head < num_kv_heads_; ++head) {
        const int unit = static_cast<int>(units_.size());
        for (int i = 0; i < num_slots; ++i)
          tasks_.push_back({unit, is_split ? i : 0, is_split ? i + 1 : num_chunks, slot + i});
        units_.push_back({s, head, token, num_tokens, slot, num_slots});
        slot += num_slots;
      }
    }
  }
  partials_.resize(static_cast<size_t>(slot) * kMaxQueries);
  accumulators_.resize(static_cast<size_t>(slot) * kMaxQueries * width_);
}

void AttentionPlan::attend(const Kernels& kernels, Stage& stage, int thread, const KV& kv, const float* q, int64_t stride,
                           int window) {
  std::vector<Partial> next(kMaxQueries);
  std::vector<float> next_accumulators(static_cast<size_t>(kMaxQueries) * width_);
  stage.share(static_cast<int>(tasks_.size()), thread, [&](int index) {
    const Task& task = tasks_[index];
    const Unit& unit = units_[task.unit];
    const Sequence& sequence = batch_.sequences[unit.sequence];
    const int first_row = sequence.query_start + unit.first_token;
    const Queries queries{q + first_row * stride + static_cast<int64_t>(unit.kv_head) * group_ * head_dim_, stride,
                          group_, unit.num_tokens, sequence.kv_len - sequence.query_len + unit.first_token};
    Partial* partials = partials_.data() + static_cast<int64_t>(task.slot) * kMaxQueries;
    float* accumulators = accumulators_.data() + static_cast<int64_t>(task.slot) * kMaxQueries * width_;
    for (int chunk = task.first_chunk; chunk < task.last_chunk; ++chunk) {
      const bool is_first = chunk == task.first_chunk;
      kernels.attend_chunk(kv, unit.kv_head, sequence, batch_.block_size, queries, chunk, window,
                           is_first ? partials : next.data(), is_first ? accumulators : next_accumulators.data());
      for (int r = 0; !is_first && r < unit.num_tokens * group_; ++r)
        kernels.fold(partials + r, accumulators + r * width_, next[r], next_accumulators.data() + r * width_, width_);
    }
  });
}

void AttentionPlan::merge_row(const Kernels& kernels, int row, int first, int last, float* out) {
  for (int head = first; head < last; ++head) {
    const Unit& unit = units_[first_unit_[row] + head / group_];
    const int token = row - batch_.sequences[unit.sequence].query_start - unit.first_token;
    const int64_t r = static_cast<int64_t>(unit.first_slot) * kMaxQueries + token * group_ + head % group_;
    Partial state{-1e30f, 0.0f};
    float accumulator[kMaxHeadDim];
    for (int i = 0; i < unit.num_slots; ++i)
      kernels.fold(&state, accumulator, partials_[r + i * kMaxQueries],
                   accumulators_.data() + (r + i * kMaxQueries) * width_, width_);
    for (int d = 0; d < head_dim_; ++d) out[head * head_dim_ + d] = accumulator[d] / state.sum;
  }
}

Decoder::Decoder(Shape shape, std::shared_ptr<const Weight> embedding, LinearLayer state_projection,
                 std::vector<Layer> layers, std::vector<float> norm, std::vector<float> cos, std::vector<float> sin)
    : shape_(shape),
      embedding_(std::move(embedding)),
      state_projection_(std::move(state_projection)),
      layers_(std::move(layers)),
      norm_(std::move(norm)),
      cos_(std::move(cos)),
      sin_(std::move(sin)) {}

void Decoder::forward(const Kernels& kernels, Threads& threads, KVStore& store, const int64_t* token_ids,
                      const float* states, const Batch& batch, float* hidden, bool kv_only) {
  const std::lock_guard<std::mutex> lock(one_caller_);
  const int hidden_size = shape_.hidden_size, inner = shape_.intermediate_size, head_dim = shape_.head_dim;
  const int q_size = shape_.num_heads * head_dim, kv_size = shape_.num_kv_heads * head_dim;
  const int qkv_size = q_size + 2 * kv_size, num_rows = batch.num_tokens;
  float* qkv = qkv_.floats(static_cast<size_t>(num_rows) * qkv_size);
  float* gate_up = gate_up_.floats(static_cast<size_t>(num_rows) * 2 * inner);
  // Only one product's rows are needed at a time; the room for them is made before the threads start.
  for (const Layer& layer : layers_)
    for (const LinearLayer* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      rows_for(*linear->weight, num_rows, rows_);
  if (state_projection_.weight) rows_for(*state_projection_.weight, num_rows, rows_);
  std::vector<Stage> stages(kStagesPerLayer * layers_.size() + kOtherStages);
  AttentionPlan plan(batch, shape_.num_heads, store.layer(0));
  const int num_threads = threads.count();

  threads.run([&](int thread) {
    std::vector<float> row_values(std::max({hidden_size, q_size, inner}));  // of the row at hand
    float* const values = row_values.data();
    Stage* stage = stages.data();  // the next one; every thread goes through all
    auto multiply = [&](const LinearLayer& linear, const Rows& input, float* out, int64_t stride, bool accumulate) {
      const Panels& panels = linear.weight->panels();
      const Output output{out, stride, linear.bias.empty() ? nullptr : linear.bias.data(), accumulate};
      share_ranges(*stage++, panels.num_panels(), num_threads, thread, [&](int first, int last) {
        kernels.linear(panels, first, last, input, num_rows, output);
      });
    };
    auto norm_rows = [&](const std::vector<float>& weight, const Rows& normed) {
      share_rows(*stage++, num_rows, normed.num_groups, num_threads, thread, [&](int row, int first, int last) {
        kernels.rms_norm(hidden + static_cast<int64_t>(row) * hidden_size, weight.data(), hidden_size,
                         shape_.rms_norm_eps, values);
        kernels.prepare_row(values, hidden_size, normed, row, first, last);
      });
    };
    auto rotate_and_write = [&](const Layer& layer, const KV& kv, int row, int head) {
      const int num_queries = shape_.num_heads, num_keys = shape_.num_kv_heads;
      const int64_t angle = batch.positions[row] * head_dim, slot = batch.slots[row];
      float* x = qkv + static_cast<int64_t>(row) * qkv_size + head * head_dim;
      if (head >= num_queries + num_keys) return kernels.write_value(kv, slot, head - num_queries - num_keys, x);
      const std::vector<float>& norm = head < num_queries ? layer.q_norm : layer.k_norm;
      if (!norm.empty()) kernels.rms_norm(x, norm.data(), head_dim, shape_.rms_norm_eps, x);
      kernels.rope(x, cos_.data() + angle, sin_.data() + angle, head_dim);
      if (head >= num_queries) kernels.write_key(kv, slot, head - num_queries, x);
    };
    // Shared by heads: slots side by side lie in the same cache lines, those of two heads never do.
    auto rotate_and_write_rows = [&](const Layer& layer, const KV& kv) {
      share_ranges(*stage++, shape_.num_heads + 2 * shape_.num_kv_heads, num_threads, thread, [&](int first, int last) {
        for (int row = 0; row < num_rows; ++row)
          for (int head = first; head < last; ++head) rotate_and_write(layer, kv, row, head);
      });
    };
    auto merge_rows = [&](const Rows& attended) {
      share_rows(*stage++, num_rows, attended.num_groups, num_threads, thread, [&](int row, int first, int last) {
        const int last_head = std::min(shape_.num_heads, (last * kGroup + head_dim - 1) / head_dim);
        plan.merge_row(kernels, row, first * kGroup / head_dim, last_head, values);
        kernels.prepare_row(values, q_size, attended, row, first, last);
      });
    };
    auto gate_rows = [&](const Rows& gated) {
      share_rows(*stage++, num_rows, gated.num_groups, num_threads, thread, [&](int row, int first, int last) {
        const float* gate = gate_up + static_cast<int64_t>(row) * 2 * inner;
        const int start = first * kGroup, end = std::min(inner, last * kGroup);
        kernels.silu_gate(gate + start, gate + inner + start, end - start, values + start);
        kernels.prepare_row(values, inner, gated, row, first, last);
      });
    };

    share_ranges(*stage++, num_rows, num_threads, thread, [&](int first, int last) {
      for (int row = first; row < last; ++row)
        kernels.unpack_row(embedding_->panels(), static_cast<int>(token_ids[row]),
                           hidden + static_cast<int64_t>(row) * hidden_size);
    });
    if (state_projection_.weight) {
      const Rows prepared = rows_for(*state_projection_.weight, num_rows, rows_);
      share_rows(*stage++, num_rows, prepared.num_groups, num_threads, thread, [&](int row, int first, int last) {
        kernels.prepare_row(states + static_cast<int64_t>(row) * state_size(), state_size(), prepared, row, first, last);
      });
      multiply(state_projection_, prepared, hidden, hidden_size, true);
    }
    for (int l = 0; l < static_cast<int>(layers_.size()); ++l) {
      const Layer& layer = layers_[l];
      const KV kv = store.layer(l);
      const Rows normed = rows_for(*layer.qkv.weight, num_rows, rows_);
      norm_rows(layer.attention_norm, normed);
      multiply(layer.qkv, normed, qkv, qkv_size, false);
      rotate_and_write_rows(layer, kv);
      if (kv_only && l + 1 == static_cast<int>(layers_.size())) return;
      plan.attend(kernels, *stage++, thread, kv, qkv, qkv_size, layer.window);
      const Rows attended = rows_for(*layer.output.weight, num_rows, rows_);
      merge_rows(attended);
      multiply(layer.output, attended, hidden, hidden_size, true);
      const Rows normed_again = rows_for(*layer.gate_up.weight, num_rows, rows_);
      norm_rows(layer.mlp_norm, normed_again);
      multiply(layer.gate_up, normed_again, gate_up, 2 * inner, false);
      const Rows gated = rows_for(*layer.down.weight, num_rows, rows_);
      gate_rows(gated);
      multiply(layer.down, gated, hidden, hidden_size, true);
    }
    share_ranges(*stage++, num_rows, num_threads, thread, [&](int first, int last) {
      for (int row = first; row < last; ++row) {
        float* x = hidden + static_cast<int64_t>(row) * hidden_size;
        kernels.rms_norm(x, norm_.data(), hidden_size, shape_.rms_norm_eps, x);
      }
    });
  });
}

void Decoder::check(const int64_t* token_ids, const Batch& batch, int hidden_size, const KVStore& store) const {
  const int64_t num_positions = static_cast<int64_t>(cos_.size()) / shape_.head_dim;
  bool holds = hidden_size == shape_.hidden_size && store.has(static_cast<int>(layers_.size()) - 1);
  for (int i = 0; holds && i < batch.num_tokens; ++i)
    holds = token_ids[i] >= 0 && token_ids[i] < embedding_->panels().num_outputs && batch.positions[i] >= 0 &&
            batch.positions[i] < num_positions;
  if (!holds) throw std::invalid_argument("a token id, a position or a layer is out of range");
}

int64_t Decoder::read_weights(const Kernels& kernels, Threads& threads) const {
  std::vector<const Weight*> weights;
  for (const Layer& layer : layers_)
    for (const LinearLayer* linear : {&layer.qkv, &layer.output, &layer.gate_up, &layer.down})
      weights.push_back(linear->weight.get());
  weights.push_back(embedding_.get());
  if (state_projection_.weight) weights.push_back(state_projection_.weight.get());
  std::atomic<uint64_t> mixed{0};  // kept, so that no compiler finds the reading useless
  std::vector<Stage> stages(weights.size());
  threads.run([&](int thread) {
    for (size_t i = 0; i < weights.size(); ++i) {
      const int64_t bytes = weights[i]->panels().panel_bytes();
      share_ranges(stages[i], weights[i]->panels().num_panels(), threads.count(), thread, [&](int first, int last) {
        mixed ^= kernels.read(weights[i]->panels().data + first * bytes, (last - first) * bytes);
      });
    }
  });
  int64_t total = 0;
  for (const Weight* weight : weights) total += weight->panels().panel_bytes() * weight->panels().num_panels();
  return total;
}

}  // namespace paceline

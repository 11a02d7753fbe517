// A decoder's forward pass in one call. Its definition, operation by operation, is paceline/model/decoder.py; the two
// give the same bits, because they run the same kernels on the same rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels.h"
#include "threads.h"
#include "weight.h"

namespace paceline {

struct Shape {
  int hidden_size;
  int intermediate_size;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  float rms_norm_eps;
};

struct LinearLayer {
  std::shared_ptr<const Weight> weight;
  std::vector<float> bias;  // empty: none
};

struct Layer {
  std::vector<float> attention_norm, mlp_norm;
  std::vector<float> q_norm, k_norm;  // empty: none
  LinearLayer qkv, output, gate_up, down;
  int window;  // 0: all positions
};

// A ragged batch; see AttentionMetadata in paceline/backends/metadata.py.
struct Batch {
  int num_tokens;
  const int64_t* positions;
  const int64_t* slots;
  std::vector<Sequence> sequences;
  int block_size;
};

// Floats that are kept between calls and grow when asked for more.
class Scratch {
 public:
  float* floats(size_t count);

 private:
  Buffer buffer_;
};

// Prepared rows of what `weight` multiplies, in scratch memory.
Rows rows_for(const Weight& weight, int num_rows, Scratch& scratch);

// Calls body(row, first, last) for num_rows rows with `num_groups` groups of inputs. A part is a tile of 16 rows, or, where
// tiles are too few to go round, a range of the groups of its rows: no two parts write to one cache line.
template <typename Body>
void share_rows(Stage& stage, int num_rows, int num_groups, int num_threads, int thread, Body body) {
  const int num_tiles = (num_rows + kRowTile - 1) / kRowTile;
  const int num_ranges = num_tiles < 4 * num_threads ? std::min(num_threads, num_groups) : 1;
  stage.share(num_tiles * num_ranges, thread, [&](int part) {
    const int tile = part / num_ranges;
    const Part groups = part_of(num_groups, part % num_ranges, num_ranges);
    for (int row = tile * kRowTile; row < std::min(num_rows, (tile + 1) * kRowTile); ++row)
      body(row, groups.first, groups.last);
  });
}

// out [num_rows, outputs] = x [num_rows, inputs] times a weight, by all threads; bias may be null.
void multiply(const Kernels& kernels, Threads& threads, const Weight& weight, const float* bias, const float* x,
              int num_rows, float* out);

// Attention over a batch, divided into tasks that any thread may take: the division never changes a bit.
class AttentionPlan {
 public:
  AttentionPlan(const Batch& batch, int num_heads, const KV& kv);

  // Shared by threads, the one after the other: scores and weighted values, then each row's result.
  void attend(const Kernels& kernels, Stage& stage, int thread, const KV& kv, const float* q, int64_t stride, int window);
  // Heads [first, last) of a row; out [heads, head_dim] is the whole row.
  void merge_row(const Kernels& kernels, int row, int first, int last, float* out);

 private:
  struct Unit {  // query rows of one sequence and one K/V head
    int sequence, kv_head, first_token, num_tokens, first_slot, num_slots;
  };
  struct Task {
    int unit, first_chunk, last_chunk, slot;
  };
  const Batch& batch_;
  int num_heads_, num_kv_heads_, head_dim_, width_, group_;
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<int> first_unit_;  // per row of the batch, its unit for K/V head 0
  std::vector<Partial> partials_;
  std::vector<float> accumulators_;
};

class Decoder {
 public:
  // With a `state_projection` (a draft head's; its weight is null without one) the input is a token and a hidden state.
  Decoder(Shape shape, std::shared_ptr<const Weight> embedding, LinearLayer state_projection,
          std::vector<Layer> layers, std::vector<float> norm, std::vector<float> cos, std::vector<float> sin);

  // Hidden states after the final norm, [num_tokens, hidden_size]; K/V of the tokens are written to `store`. `states`
  // [num_tokens, state_size()] are read where there is a state projection. With `kv_only` the pass ends with the last
  // layer's K/V, and `hidden` is scratch.
  void forward(const Kernels& kernels, Threads& threads, KVStore& store, const int64_t* token_ids, const float* states,
               const Batch& batch, float* hidden, bool kv_only);

  // Width of the states that forward takes; 0: none.
  int state_size() const { return state_projection_.weight ? state_projection_.weight->panels().num_inputs : 0; }

  // Throws std::invalid_argument where the batch asks for what model or store do not have.
  void check(const int64_t* token_ids, const Batch& batch, int hidden_size, const KVStore& store) const;

  // Reads all weights once, the embedding table (a tied head) included; returns their bytes.
  int64_t read_weights(const Kernels& kernels, Threads& threads) const;

 private:
  Shape shape_;
  std::shared_ptr<const Weight> embedding_;
  LinearLayer state_projection_;
  std::vector<Layer> layers_;
  std::vector<float> norm_, cos_, sin_;
  std::mutex one_caller_;
  Scratch rows_, qkv_, gate_up_;
};

}  // namespace paceline

// The kernels of one instruction set, as plain functions over raw memory. Every one of them computes a row from that
// row alone and in one fixed order, so the result is bitwise the same whatever stands beside it (law 6).
#pragma once

#include <cstdint>

namespace paceline {

constexpr int kPanel = 16;  // outputs of a weight that are computed together
constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kRowTile = 16;  // rows that are prepared side by side
constexpr int kTile = 16;   // slots of the K/V store that lie together
constexpr int kChunk = 256; // positions whose softmax is computed at once, KV_GROUP in Python; a multiple of kTile
constexpr int kHeadStep = 32;  // a head's numbers are stored in multiples of this
constexpr int kMaxHeadDim = 256;
constexpr int kMaxQueries = 64;  // query rows (tokens x heads of one K/V head) of one attention task; whole row tiles

enum class Format : int { kInt4 = 4, kInt8 = 8, kBf16 = 16 };

// A weight [num_outputs, num_inputs] in panels of 16 outputs. Quantised panels hold, per group of 32 inputs, 16 scales
// and 16 minima (fp16) and the codes with four inputs of one output side by side; 4-bit codes of inputs 0-15 are the low
// nibbles, of 16-31 the high ones. bf16 panels hold pairs of inputs.
struct Panels {
  Format format;
  int num_outputs;
  int num_inputs;
  int num_groups;  // groups of 32 inputs, the last one padded
  const uint8_t* data;
  int64_t panel_bytes() const {
    if (format == Format::kBf16) return static_cast<int64_t>(num_groups) * kGroup * kPanel * 2;
    return static_cast<int64_t>(num_groups) * (4 * kPanel + kGroup * kPanel * static_cast<int>(format) / 8);
  }
  int num_panels() const { return (num_outputs + kPanel - 1) / kPanel; }
};

// Rows ready to be multiplied, in tiles of 16 that lie together so that the inner loop needs one pointer. For quantised
// weights a tile holds per group of 32 inputs codes [16 rows][32], scales [16 rows] and sums [16 rows], where a sum is
// scale * sum of codes; for bf16 weights values [32 inputs][16 rows].
struct Rows {
  int num_groups;
  bool is_quantised;
  uint8_t* data;
  int64_t group_bytes() const { return is_quantised ? kRowTile * (kGroup + 8) : kRowTile * kGroup * 4; }
  int64_t tile_bytes() const { return num_groups * group_bytes(); }
};

struct Output {
  float* data;
  int64_t stride;     // floats between rows
  const float* bias;  // [num_outputs] or null
  bool accumulate;    // add to what is there (the residual stream)
};

// The K/V of one layer: per head tiles of 16 slots, a tile of keys being [width / 2][16][2] and of values [8][width][2],
// in bf16 or as signed bytes with a scale for each slot, [16] a tile. A head's tiles lie together, so that a thread which
// reads one head's blocks in their order reads memory in its order. The width is the head size rounded up to 32; what
// lies beyond the head is zero.
struct KV {
  uint8_t* keys;
  uint8_t* values;
  float* key_scales;  // null for bf16
  float* value_scales;
  int64_t num_tiles;  // of a head
  int num_heads;
  int head_dim;
  int width;
  bool is_int8() const { return key_scales != nullptr; }
};

// One sequence's share of a batch; see SequenceSlice in paceline/backends/metadata.py.
struct Sequence {
  int query_start;
  int query_len;
  int kv_len;
  const int32_t* block_ids;
};

// Query rows of one sequence and one K/V head: tokens [first_token, first_token + num_tokens) of the batch, each with
// `group` heads. q points at [tokens, heads, head_dim].
struct Queries {
  const float* q;
  int64_t token_stride;
  int group;
  int num_tokens;
  int first_position;  // of the first token
};

// What a chunk leaves behind per query row: softmax maximum, sum, and the weighted values [width].
struct Partial {
  float maximum;
  float sum;
};

struct Kernels {
  const char* name;
  // Groups [first, last) of x [n] become those of row `row` of rows; inputs beyond n are zero.
  void (*prepare_row)(const float* x, int n, Rows rows, int row, int first, int last);
  // Panels [first, last) of the product for num_rows rows.
  void (*linear)(const Panels& weight, int first, int last, const Rows& rows, int num_rows, Output out);
  void (*rms_norm)(const float* x, const float* weight, int n, float eps, float* out);
  void (*silu_gate)(const float* gate, const float* up, int n, float* out);
  // Rotates one head in place; sin's first half is negated already.
  void (*rope)(float* head, const float* cos, const float* sin, int head_dim);
  void (*write_key)(const KV& kv, int64_t slot, int head, const float* k);  // k [head_dim]
  void (*write_value)(const KV& kv, int64_t slot, int head, const float* v);
  // Attention of the queries over positions [chunk * kChunk, ...) of their sequence; partials and accumulators have
  // room for kMaxQueries rows, [rows] and [rows, width]. Rows that see nothing of the chunk get sum 0.
  void (*attend_chunk)(const KV& kv, int kv_head, const Sequence& sequence, int block_size, const Queries& queries,
                       int chunk, int window, Partial* partials, float* accumulators);
  // Folds `next` into (state, accumulator); a row's chunks are folded in ascending order, always.
  void (*fold)(Partial* state, float* accumulator, const Partial& next, const float* next_accumulator, int width);
  // out [num_inputs]: one row of the weight as floats (an embedding).
  void (*unpack_row)(const Panels& weight, int output, float* out);
  // Reads every byte and does nothing with it: the time below which no product can be.
  uint64_t (*read)(const uint8_t* data, int64_t num_bytes);
};

const Kernels* amx_kernels();
const Kernels* avx512bf16_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* portable_kernels();

}  // namespace paceline

// The kernels, written once over the sixteen lanes of simd.h and compiled once per instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

#include "kernels.h"

namespace paceline {
namespace {

#include "simd.h"

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;

// e^x for x <= 88; below -87.3 exactly 0. Range reduction by ln 2 and a polynomial of degree 5 on [-ln2/2, ln2/2]
// (Cephes); relative error below 2e-7.
inline F exp_lanes(F x) {
  x = min(max(x, broadcast(-88.5f)), broadcast(88.0f));
  const F n = nearest(mul(x, broadcast(kLog2E)));
  F r = fma(n, broadcast(-kLn2High), x);
  r = fma(n, broadcast(-kLn2Low), r);
  F p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  p = add(fma(mul(p, r), r, r), broadcast(1.0f));
  return times_power(p, n);
}

inline uint16_t to_bf16(float x) {  // finite; to nearest, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

void prepare_row(const float* x, int n, Rows rows, int row, int first, int last) {
  uint8_t* tile = rows.data + rows.tile_bytes() * (row / kRowTile) + rows.group_bytes() * first;
  const int lane = row % kRowTile;
  for (int g = first; g < last; ++g, tile += rows.group_bytes()) {
    const float* group = x + g * kGroup;
    alignas(64) float padded[kGroup] = {};
    if (n - g * kGroup < kGroup) {
      __builtin_memcpy(padded, group, static_cast<unsigned>(n - g * kGroup) * sizeof(float));
      group = padded;
    }
    if (!rows.is_quantised) {
      float* values = reinterpret_cast<float*>(tile);
      for (int i = 0; i < kGroup; ++i) values[i * kRowTile + lane] = group[i];
      continue;
    }
    const F a = load(group), b = load(group + kLanes);
    const float largest = max_lanes(max(abs(a), abs(b)));
    const float scale = largest / 127.0f;
    const F inverse = broadcast(largest > 0.0f ? 127.0f / largest : 0.0f);
    const I code_a = round(mul(a, inverse)), code_b = round(mul(b, inverse));
    int8_t* codes = reinterpret_cast<int8_t*>(tile) + lane * kGroup;
    store_bytes(codes, code_a);
    store_bytes(codes + kLanes, code_b);
    float* scales = reinterpret_cast<float*>(tile + kRowTile * kGroup);
    scales[lane] = scale;
    scales[kRowTile + lane] = scale * sum_lanes(to_float(add(code_a, code_b)));
  }
}

// Weights are asked for this many bytes ahead: the processor's own prefetcher stops at the end of every 4 kB.
constexpr int kAhead = 4096;

inline void prefetch(const void* start, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(static_cast<const char*>(start) + i);
}

// The sums of one group of a panel for R rows of codes, exact in integers.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// Products are summed in 16 bits, as the instruction that multiplies bytes does: 16 pairs of a nibble and a byte stay
// below 32 * 15 * 128 / 2 there. Codes of 8 bits are two nibbles.
template <int R, bool IsHigh>
inline void add_nibbles(const uint8_t* codes, const int8_t* rows, int num_quads, I* pairs) {
#pragma GCC unroll 8
  for (int quad = 0; quad < num_quads; ++quad) {
    const Codes w = IsHigh ? high_nibbles(codes + 64 * quad) : low_nibbles(codes + 64 * quad);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) pairs[r] = add_pairs(pairs[r], w, rows + kGroup * r + 4 * quad);
  }
}
template <int P, int R, int Bits>
inline void sum_group(const uint8_t* codes, int64_t, const int8_t* rows, I (*sums)[R]) {
  static_assert(P == 1);
  I low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = broadcast_int(0);
  if constexpr (Bits == 4) {
    add_nibbles<R, false>(codes, rows, 4, low);
    add_nibbles<R, true>(codes, rows + kGroup / 2, 4, low);
    for (int r = 0; r < R; ++r) sums[0][r] = widen(low[r], 1);
  } else {
    add_nibbles<R, false>(codes, rows, 8, low);
    add_nibbles<R, true>(codes, rows, 8, high);
    for (int r = 0; r < R; ++r) sums[0][r] = add(widen(low[r], 1), widen(high[r], 16));
  }
}
#else
template <int P, int R, int Bits>
inline void sum_group(const uint8_t* codes, int64_t panel_bytes, const int8_t* rows, I (*sums)[R]) {
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[p][r] = broadcast_int(0);
#pragma GCC unroll 8
  for (int quad = 0; quad < 8; ++quad) {
    Codes w[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const uint8_t* of_panel = codes + p * panel_bytes;
      if constexpr (Bits == 8)
        w[p] = load_codes(of_panel + 64 * quad);
      else
        w[p] = quad < 4 ? low_nibbles(of_panel + 64 * quad) : high_nibbles(of_panel + 64 * (quad - 4));
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Quad x = load_quad(rows + kGroup * r + 4 * quad);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) sums[p][r] = dot4(sums[p][r], w[p], x);
    }
  }
}
#endif

// P panels side by side times R rows of a tile, from row `lane` on. The integer sums of a group are exact; groups are
// added in ascending order.
template <int P, int R, int Bits>
inline void multiply_quantised(const uint8_t* panel, int64_t panel_bytes, const uint8_t* tile, int lane, int num_groups,
                               F (*out)[R]) {
  F acc[P][R];
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) acc[p][r] = broadcast(0.0f);
  const int64_t ahead = P == 1 ? kAhead : P * panel_bytes;
  for (int g = 0; g < num_groups; ++g) {
    const uint8_t* codes = panel + 4 * kPanel;
    I sums[P][R];
    sum_group<P, R, Bits>(codes, panel_bytes, reinterpret_cast<const int8_t*>(tile) + lane * kGroup, sums);
    const float* scales = reinterpret_cast<const float*>(tile + kRowTile * kGroup) + lane;
    F scale[P], minimum[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + p * panel_bytes);
      scale[p] = load_half(halves);
      minimum[p] = load_half(halves + kPanel);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F row_scale = broadcast(scales[r]), row_sum = broadcast(scales[kRowTile + r]);
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) {
        acc[p][r] = fma(to_float(sums[p][r]), mul(scale[p], row_scale), acc[p][r]);
        acc[p][r] = fma(minimum[p], row_sum, acc[p][r]);
      }
    }
    panel += 4 * kPanel + kGroup * kPanel * Bits / 8;
    tile += kRowTile * (kGroup + 8);
    for (int p = 0; p < P; ++p)
      prefetch(panel + p * panel_bytes + ahead, 4 * kPanel + kGroup * kPanel * Bits / 8);
  }
#pragma GCC unroll 2
  for (int p = 0; p < P; ++p)
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) out[p][r] = acc[p][r];
}

template <int R>
inline void multiply_bf16(const uint8_t* panel, const uint8_t* tile, int lane, int num_groups, F* out) {
  const float* values = reinterpret_cast<const float*>(tile) + lane;
  const uint16_t* pairs = reinterpret_cast<const uint16_t*>(panel);
  F even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = broadcast(0.0f);
  for (int k = 0; k < num_groups * kGroup; k += 2, pairs += 2 * kPanel, values += 2 * kRowTile) {
    const F w_even = load_even_bf16(pairs), w_odd = load_odd_bf16(pairs);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      even[r] = fma(w_even, broadcast(values[r]), even[r]);
      odd[r] = fma(w_odd, broadcast(values[kRowTile + r]), odd[r]);
    }
  }
  for (int r = 0; r < R; ++r) out[r] = add(even[r], odd[r]);
}

// Writes the 16 outputs of a panel for one row.
inline void write_outputs(const Panels& weight, int panel, int row, F product, const Output& out) {
  const int left = weight.num_outputs - panel * kPanel;
  const int n = left < kPanel ? left : kPanel;
  float* target = out.data + out.stride * row + panel * kPanel;
  if (out.bias != nullptr) product = add(product, load_first(out.bias + panel * kPanel, n));
  if (out.accumulate) product = add(load_first(target, n), product);
  store_first(target, product, n);
}

template <int P, int R>
void multiply_panels(const Panels& weight, int panel, const Rows& rows, int first_row, const Output& out) {
  const uint8_t* data = weight.data + weight.panel_bytes() * panel;
  const uint8_t* tile = rows.data + rows.tile_bytes() * (first_row / kRowTile);
  const int lane = first_row % kRowTile;
  F product[P][R];
  if (weight.format == Format::kInt4)
    multiply_quantised<P, R, 4>(data, weight.panel_bytes(), tile, lane, rows.num_groups, product);
  else if (weight.format == Format::kInt8)
    multiply_quantised<P, R, 8>(data, weight.panel_bytes(), tile, lane, rows.num_groups, product);
  else if constexpr (P == 1 && R <= kMaxFloatRows)
    multiply_bf16<R>(data, tile, lane, rows.num_groups, product[0]);
  else if constexpr (P == 1) {
    multiply_bf16<R / 2>(data, tile, lane, rows.num_groups, product[0]);
    multiply_bf16<R - R / 2>(data, tile, lane + R / 2, rows.num_groups, product[0] + R / 2);
  }
  for (int p = 0; p < P; ++p)
    for (int r = 0; r < R; ++r) write_outputs(weight, panel + p, first_row + r, product[p][r], out);
}

template <int P, int R>
void multiply_rest(const Panels& weight, int panel, const Rows& rows, int first_row, int num_rows, const Output& out) {
  if constexpr (R > 0) {
    if (num_rows == R)
      multiply_panels<P, R>(weight, panel, rows, first_row, out);
    else
      multiply_rest<P, R - 1>(weight, panel, rows, first_row, num_rows, out);
  }
}

// Panels [first, last), P at a time and R rows.
template <int P, int R>
void multiply_all(const Panels& weight, int first, int last, const Rows& rows, int num_rows, const Output& out) {
  for (int panel = first; panel < last; panel += P) {
    int row = 0;
    for (; row + R <= num_rows; row += R) multiply_panels<P, R>(weight, panel, rows, row, out);
    multiply_rest<P, R - 1>(weight, panel, rows, row, num_rows - row, out);
  }
}

#if defined(__AMX_INT8__)
#include "amx_linear.inl"
#endif

void linear(const Panels& weight, int first, int last, const Rows& rows, int num_rows, Output out) {
#if defined(__AMX_INT8__)
  if (rows.is_quantised && num_rows >= kAmxRows)
    return linear_amx(weight, first, last, rows, num_rows, out);
#endif
  // Many rows are bound by arithmetic: two panels share what is read of a row. A few are bound by reading the weights,
  // and one panel at a time reads them in their order.
  if constexpr (kPairedRows > 0) {
    if (rows.is_quantised && num_rows > kMaxRows) {
      const int num_paired = (last - first) / 2 * 2;
      multiply_all<2, kPairedRows>(weight, first, first + num_paired, rows, num_rows, out);
      first += num_paired;
    }
  }
  multiply_all<1, kMaxRows>(weight, first, last, rows, num_rows, out);
}

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  F squares = broadcast(0.0f);
  for (int i = 0; i < n; i += kLanes) {
    const F a = n - i >= kLanes ? load(x + i) : load_first(x + i, n - i);
    squares = fma(a, a, squares);
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(squares) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void silu_gate(const float* gate, const float* up, int n, float* out) {
  const F one = broadcast(1.0f);
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = n - i < kLanes ? n - i : kLanes;
    const F g = load_first(gate + i, lanes), u = load_first(up + i, lanes);
    const F sigmoid = div(one, add(one, exp_lanes(sub(broadcast(0.0f), g))));
    store_first(out + i, mul(mul(g, sigmoid), u), lanes);
  }
}

void rope(float* head, const float* cos, const float* sin, int head_dim) {
  const int half = head_dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] + b * sin[i];
    head[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

// Numbers of one head in a tile, and where those of a slot's key or value lie among them.
inline int64_t tile_size(const KV& kv) { return static_cast<int64_t>(kTile) * kv.width; }
inline int64_t find_head(const KV& kv, int64_t slot, int head) { return head * kv.num_tiles + slot / kTile; }
inline int key_place(int lane, int d) { return (d / 2) * 2 * kTile + 2 * lane + d % 2; }
inline int value_place(int lane, int d, int width) { return (lane / 2) * 2 * width + 2 * d + lane % 2; }

// The store holds finite numbers only: what a broken request leaves behind is multiplied by 0 in the next owner's
// attention, and 0 * NaN would be NaN.
inline float finite(float x) {
  constexpr float kLargest = 3.38953139e38f;  // as a bf16
  if (x != x) return 0.0f;
  return x > kLargest ? kLargest : x < -kLargest ? -kLargest : x;
}

// Puts x [head_dim] into the tile, in bf16 or as codes -127 to 127 times a scale.
template <typename Place>
inline void write_head(const KV& kv, uint8_t* numbers, float* scales, int64_t slot, int head, const float* x,
                       Place place) {
  const int64_t at = find_head(kv, slot, head);
  if (!kv.is_int8()) {
    uint16_t* out = reinterpret_cast<uint16_t*>(numbers) + at * tile_size(kv);
    for (int d = 0; d < kv.head_dim; ++d) out[place(d)] = to_bf16(finite(x[d]));
    return;
  }
  float largest = 0.0f;
  for (int d = 0; d < kv.head_dim; ++d) {
    const float magnitude = __builtin_fabsf(finite(x[d]));
    largest = magnitude > largest ? magnitude : largest;
  }
  if (largest < 1e-30f) largest = 0.0f;  // its inverse would overflow
  scales[at * kTile + slot % kTile] = largest / 127.0f;
  const float inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
  int8_t* out = reinterpret_cast<int8_t*>(numbers) + at * tile_size(kv);
  for (int d = 0; d < kv.head_dim; ++d) {
    const float nearest = (finite(x[d]) * inverse + 12582912.0f) - 12582912.0f;  // 1.5 * 2^23: ties to even
    out[place(d)] = static_cast<int8_t>(nearest);
  }
}

void write_key(const KV& kv, int64_t slot, int head, const float* k) {
  const int lane = static_cast<int>(slot % kTile);
  write_head(kv, kv.keys, kv.key_scales, slot, head, k, [=](int d) { return key_place(lane, d); });
}

void write_value(const KV& kv, int64_t slot, int head, const float* v) {
  const int lane = static_cast<int>(slot % kTile), width = kv.width;
  write_head(kv, kv.values, kv.value_scales, slot, head, v, [=](int d) { return value_place(lane, d, width); });
}

// A code is a whole number below 2^8, so that bf16 holds it.
inline uint16_t code_to_bf16(int8_t code) {
  const float value = static_cast<float>(code);
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return static_cast<uint16_t>(bits >> 16);
}
inline uint16_t number_at(const uint8_t* numbers, int64_t i, bool is_int8) {
  return is_int8 ? code_to_bf16(reinterpret_cast<const int8_t*>(numbers)[i])
                 : reinterpret_cast<const uint16_t*>(numbers)[i];
}

// What attention reads of 16 positions of a head: numbers in bf16, and their scales where they are codes.
struct Tile {
  const uint16_t* keys;
  const uint16_t* values;
};
struct Scales {
  alignas(64) float keys[kChunk];
  alignas(64) float values[kChunk];
};

// A tile that lies together in the store: read in place, or widened into scratch.
inline Tile whole_tile(const KV& kv, int64_t at, uint16_t* scratch, float* key_scales, float* value_scales) {
  const int64_t size = tile_size(kv);
  if (!kv.is_int8()) {
    const Tile tile{reinterpret_cast<const uint16_t*>(kv.keys) + at * size,
                    reinterpret_cast<const uint16_t*>(kv.values) + at * size};
    prefetch(tile.keys, 2 * size);
    return tile;
  }
  const int8_t* keys = reinterpret_cast<const int8_t*>(kv.keys) + at * size;
  const int8_t* values = reinterpret_cast<const int8_t*>(kv.values) + at * size;
  for (int64_t i = 0; i < size; ++i) scratch[i] = code_to_bf16(keys[i]);
  for (int64_t i = 0; i < size; ++i) scratch[size + i] = code_to_bf16(values[i]);
  __builtin_memcpy(key_scales, kv.key_scales + at * kTile, kTile * sizeof(float));
  __builtin_memcpy(value_scales, kv.value_scales + at * kTile, kTile * sizeof(float));
  return {scratch, scratch + size};
}

// The tile of 16 positions from `position` on: whole where blocks are whole tiles, else gathered slot by slot.
inline Tile find_tile(const KV& kv, int kv_head, const Sequence& sequence, int block_size, int position,
                      uint16_t* scratch, float* key_scales, float* value_scales) {
  const auto slot_of = [&](int p) {
    return static_cast<int64_t>(sequence.block_ids[p / block_size]) * block_size + p % block_size;
  };
  if (block_size % kTile == 0)
    return whole_tile(kv, find_head(kv, slot_of(position), kv_head), scratch, key_scales, value_scales);
  const int width = kv.width;
  uint16_t* values = scratch + tile_size(kv);
  for (int lane = 0; lane < kTile; ++lane) {
    const bool is_filled = position + lane < sequence.kv_len;
    const int64_t slot = is_filled ? slot_of(position + lane) : 0;
    const int64_t at = find_head(kv, slot, kv_head), first = at * tile_size(kv);
    const int from = static_cast<int>(slot % kTile);
    for (int d = 0; d < width; ++d) {
      scratch[key_place(lane, d)] = is_filled ? number_at(kv.keys, first + key_place(from, d), kv.is_int8()) : 0;
      values[value_place(lane, d, width)] =
          is_filled ? number_at(kv.values, first + value_place(from, d, width), kv.is_int8()) : 0;
    }
    if (!kv.is_int8()) continue;
    key_scales[lane] = is_filled ? kv.key_scales[at * kTile + from] : 0.0f;
    value_scales[lane] = is_filled ? kv.value_scales[at * kTile + from] : 0.0f;
  }
  return {scratch, values};
}

// What scores and weighted values are computed from: queries and probabilities as floats, or rounded to bf16.
#if defined(__AVX512BF16__)
#include "bf16_operands.inl"
#if defined(__AMX_BF16__)
#include "amx_attention.inl"
#else
#include "bf16_attention.inl"
#endif
#else
#include "float_attention.inl"
#endif

// Turns the scores of one row into e^(score - maximum), times the values' scales if there are any; positions outside
// [begin, end) of the chunk become 0. Where values are codes, scores lack the scales of the keys.
inline Partial soften(float* scores, const Scales* scales, int begin, int end, int width, Operand* probs) {
  if (scales != nullptr)
    for (int i = 0; i < width; i += kLanes) store(scores + i, mul(load(scores + i), load(scales->keys + i)));
  for (int i = 0; i < begin; ++i) scores[i] = -1e30f;
  for (int i = end; i < width; ++i) scores[i] = -1e30f;
  F largest = broadcast(-1e30f), more = largest;  // two chains: one would wait for itself
  for (int i = 0; i < width; i += 2 * kLanes) {
    largest = max(largest, load(scores + i));
    more = max(more, load(scores + i + kLanes));
  }
  const float maximum = max_lanes(max(largest, more));
  F sum = broadcast(0.0f);
  for (int i = 0; i < width; i += 2 * kLanes) {
    F low = soft_exp(sub(load(scores + i), broadcast(maximum)));
    F high = soft_exp(sub(load(scores + i + kLanes), broadcast(maximum)));
    sum = add(sum, add(low, high));
    if (scales != nullptr) {
      low = mul(low, load(scales->values + i));
      high = mul(high, load(scales->values + i + kLanes));
    }
    store_operands(probs + i, low, high);
  }
  return {maximum, sum_lanes(sum)};
}

void attend_chunk(const KV& kv, int kv_head, const Sequence& sequence, int block_size, const Queries& queries,
                  int chunk, int window, Partial* partials, float* accumulators) {
  alignas(64) float scores[kMaxQueries * kChunk];
  alignas(64) Operand q[kMaxQueries * kMaxHeadDim];
  alignas(64) Operand probs[kMaxQueries * kChunk];
  alignas(64) static thread_local uint16_t gathered[kChunk / kTile * 2 * kTile * kMaxHeadDim];
  Tile tiles[kChunk / kTile];
  Scales scales;
  const int head_dim = kv.head_dim, width = kv.width, start = chunk * kChunk;
  const int last_position = queries.first_position + queries.num_tokens - 1;
  const int end = last_position + 1 < start + kChunk ? last_position + 1 : start + kChunk;
  const int num_rows = queries.num_tokens * queries.group;
  const int num_tiles = end <= start ? 0 : (end - start + kTile - 1) / kTile;
  const bool is_out_of_window = window > 0 && start + kChunk <= queries.first_position + 1 - window;
  if (num_tiles == 0 || is_out_of_window) {
    for (int r = 0; r < num_rows; ++r) partials[r] = {-1e30f, 0.0f};
    return;
  }
  const int64_t tile_bytes = 2 * tile_size(kv);  // of keys or values
  for (int t = 0; t < num_tiles; ++t)
    tiles[t] = find_tile(kv, kv_head, sequence, block_size, start + t * kTile, gathered + t * tile_bytes,
                         scales.keys + t * kTile, scales.values + t * kTile);
  const F scale = broadcast(1.0f / __builtin_sqrtf(static_cast<float>(head_dim)));
  for (int r = 0; r < num_rows; ++r) {
    const float* from = queries.q + (r / queries.group) * queries.token_stride + (r % queries.group) * head_dim;
    const auto scaled = [&](int d) {
      const int left = head_dim - d;
      return mul(load_first(from + d, left < 0 ? 0 : left < kLanes ? left : kLanes), scale);
    };
    for (int d = 0; d < width; d += 2 * kLanes)
      store_operands(q + r * kMaxHeadDim + d, scaled(d), scaled(d + kLanes));
  }
  score(tiles, num_tiles, q, num_rows, width, scores);
  int next_tile = 0;
  for (int r = 0; r < num_rows; ++r) {
    // Values are asked for while exponentials keep the processor busy.
    for (; next_tile < num_tiles * (r + 1) / num_rows; ++next_tile) prefetch(tiles[next_tile].values, tile_bytes);
    // Probabilities are made for two tiles at a time; what belongs to no tile is 0.
    const int position = queries.first_position + r / queries.group, positions = (num_tiles + 1) / 2 * 2 * kTile;
    int row_end = position + 1 - start, row_begin = position + 1 - window - start;
    if (row_end > positions) row_end = positions;
    if (window <= 0 || row_begin < 0) row_begin = 0;
    if (row_begin >= row_end) {
      partials[r] = {-1e30f, 0.0f};
      for (int i = 0; i < positions; ++i) probs[r * kChunk + i] = 0;
    } else {
      partials[r] = soften(scores + r * kChunk, kv.is_int8() ? &scales : nullptr, row_begin, row_end, positions,
                           probs + r * kChunk);
    }
  }
  weigh(tiles, num_tiles, probs, num_rows, width, accumulators);
}

void fold(Partial* state, float* accumulator, const Partial& next, const float* next_accumulator, int width) {
  if (next.sum == 0.0f) return;
  if (state->sum == 0.0f) {
    *state = next;
    for (int d = 0; d < width; ++d) accumulator[d] = next_accumulator[d];
    return;
  }
  const float maximum = state->maximum > next.maximum ? state->maximum : next.maximum;
  const bool is_old = state->maximum == maximum;
  const float smaller = first_lane(exp_lanes(broadcast((is_old ? next.maximum : state->maximum) - maximum)));
  const float old_weight = is_old ? 1.0f : smaller, new_weight = is_old ? smaller : 1.0f;
  state->maximum = maximum;
  state->sum = state->sum * old_weight + next.sum * new_weight;
  for (int d = 0; d < width; ++d)
    accumulator[d] = accumulator[d] * old_weight + next_accumulator[d] * new_weight;
}

void unpack_row(const Panels& weight, int output, float* out) {
  const uint8_t* panel = weight.data + weight.panel_bytes() * (output / kPanel);
  const int lane = output % kPanel;
  if (weight.format == Format::kBf16) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(panel);
    for (int k = 0; k < weight.num_inputs; ++k) {
      const uint32_t bits = static_cast<uint32_t>(pairs[(k / 2) * 2 * kPanel + 2 * lane + k % 2]) << 16;
      __builtin_memcpy(out + k, &bits, 4);
    }
    return;
  }
  const int bits = static_cast<int>(weight.format);
  for (int g = 0; g < weight.num_groups; ++g) {
    float scales[kLanes], minima[kLanes];
    store(scales, load_half(reinterpret_cast<const uint16_t*>(panel)));
    store(minima, load_half(reinterpret_cast<const uint16_t*>(panel) + kPanel));
    const uint8_t* codes = panel + 4 * kPanel;
    for (int i = 0; i < kGroup && g * kGroup + i < weight.num_inputs; ++i) {
      const int quad = i / 4, at = 4 * lane + i % 4;
      int code = 0;
      if (bits == 8)
        code = codes[64 * quad + at];
      else
        code = quad < 4 ? codes[64 * quad + at] & 15 : codes[64 * (quad - 4) + at] >> 4;
      out[g * kGroup + i] = scales[lane] * static_cast<float>(code) + minima[lane];
    }
    panel += 4 * kPanel + kGroup * kPanel * bits / 8;
  }
}

uint64_t read(const uint8_t* data, int64_t num_bytes) {
  uint64_t mixed[32] = {};
  for (int64_t i = 0; i + 256 <= num_bytes; i += 256) {
    uint64_t words[32];
    __builtin_memcpy(words, data + i, 256);
    for (int j = 0; j < 32; ++j) mixed[j] ^= words[j];
  }
  uint64_t all = 0;
  for (int j = 0; j < 32; ++j) all ^= mixed[j];
  return all;
}

constexpr Kernels kKernels = {kIsa,      prepare_row, linear,       rms_norm, silu_gate,  rope,
                              write_key, write_value, attend_chunk, fold,     unpack_row, read};

}  // namespace
}  // namespace paceline

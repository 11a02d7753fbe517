// Attention in floats: keys and values are widened, queries and probabilities are not rounded.

using Operand = float;
inline F soft_exp(F x) { return exp_lanes(x); }
inline void store_operands(Operand* p, F low, F high) {
  store(p, low);
  store(p + kLanes, high);
}

// Scores of R query rows against the 16 keys of a tile; q [R, kMaxHeadDim] is scaled already.
template <int R>
inline void score_tile(const uint16_t* keys, const float* q, int width, float* scores) {
  F even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = broadcast(0.0f);
  for (int d = 0; d < width; d += 2, keys += 2 * kTile) {
    const F k_even = load_even_bf16(keys);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) even[r] = fma(k_even, broadcast(q[r * kMaxHeadDim + d]), even[r]);
    keep_order();
    const F k_odd = load_odd_bf16(keys);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) odd[r] = fma(k_odd, broadcast(q[r * kMaxHeadDim + d + 1]), odd[r]);
    keep_order();
  }
  for (int r = 0; r < R; ++r) store(scores + r * kChunk, add(even[r], odd[r]));
}

// Adds probabilities [R, kChunk] times the values of `num_tiles` tiles to 16 of the head's dimensions.
template <int R>
inline void weigh_values(const Tile* tiles, int num_tiles, const float* probs, int width, int d, float* out) {
  F even[R], odd[R];
  for (int r = 0; r < R; ++r) even[r] = odd[r] = broadcast(0.0f);
  for (int t = 0; t < num_tiles; ++t) {
    const uint16_t* values = tiles[t].values + 2 * d;
    for (int pair = 0; pair < kTile / 2; ++pair, values += 2 * width) {
      const float* p = probs + t * kTile + 2 * pair;
      const F v_even = load_even_bf16(values);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) even[r] = fma(v_even, broadcast(p[r * kChunk]), even[r]);
      keep_order();
      const F v_odd = load_odd_bf16(values);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) odd[r] = fma(v_odd, broadcast(p[r * kChunk + 1]), odd[r]);
      keep_order();
    }
  }
  for (int r = 0; r < R; ++r) store(out + r * width + d, add(even[r], odd[r]));
}

template <int R>
void score_rows(const Tile* tiles, int num_tiles, const float* q, int num_rows, int width, float* scores) {
  if constexpr (R > 0) {
    if (num_rows < R) return score_rows<R - 1>(tiles, num_tiles, q, num_rows, width, scores);
    for (int t = 0; t < num_tiles; ++t) score_tile<R>(tiles[t].keys, q, width, scores + t * kTile);
    if (num_rows > R)
      score_rows<R>(tiles, num_tiles, q + R * kMaxHeadDim, num_rows - R, width, scores + R * kChunk);
  }
}

template <int R>
void weigh_rows(const Tile* tiles, int num_tiles, const float* probs, int num_rows, int width, float* out) {
  if constexpr (R > 0) {
    if (num_rows < R) return weigh_rows<R - 1>(tiles, num_tiles, probs, num_rows, width, out);
    for (int d = 0; d < width; d += kLanes) weigh_values<R>(tiles, num_tiles, probs, width, d, out);
    if (num_rows > R) weigh_rows<R>(tiles, num_tiles, probs + R * kChunk, num_rows - R, width, out + R * width);
  }
}

inline void score(const Tile* tiles, int num_tiles, const Operand* q, int num_rows, int width, float* scores) {
  score_rows<kMaxFloatRows>(tiles, num_tiles, q, num_rows, width, scores);
}

inline void weigh(const Tile* tiles, int num_tiles, const Operand* probs, int num_rows, int width, float* out) {
  weigh_rows<kMaxFloatRows>(tiles, num_tiles, probs, num_rows, width, out);
}

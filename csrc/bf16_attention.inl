// Attention by products of bf16 pairs: an instruction multiplies 16 pairs and adds both products to float sums. Every row
// is summed pair by pair in ascending order, whatever rows stand beside it.

constexpr int kPairRows = 8;  // two accumulators each: what it takes to keep both units busy

struct Pairs { __m512bh v; };  // 16 pairs of bfloat16

inline Pairs load_pairs(const uint16_t* p) { return {reinterpret_cast<__m512bh>(_mm512_loadu_si512(p))}; }
inline Pairs broadcast_pair(const uint16_t* p) {
  int pair;
  __builtin_memcpy(&pair, p, 4);
  return {reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair))};
}
inline F dot2(F sum, Pairs a, Pairs b) { return {_mm512_dpbf16_ps(sum.v, a.v, b.v)}; }

// Scores of R rows q [R, kMaxHeadDim] against the 16 keys of each of N tiles.
template <int R, int N>
inline void score_tiles(const Tile* tiles, const uint16_t* q, int width, float* scores) {
  F sums[N][R];
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < R; ++r) sums[t][r] = broadcast(0.0f);
  for (int d = 0; d < width; d += 2) {
    Pairs keys[N];
    for (int t = 0; t < N; ++t) keys[t] = load_pairs(tiles[t].keys + d * kTile);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Pairs pair = broadcast_pair(q + r * kMaxHeadDim + d);
      for (int t = 0; t < N; ++t) sums[t][r] = dot2(sums[t][r], keys[t], pair);
    }
  }
  for (int t = 0; t < N; ++t)
    for (int r = 0; r < R; ++r) store(scores + r * kChunk + t * kTile, sums[t][r]);
}

// out [R, width] at 32 of the head's dimensions = probs [R, kChunk] times the values of some tiles.
template <int R>
inline void weigh_tiles(const Tile* tiles, int num_tiles, const uint16_t* probs, int width, int d, float* out) {
  F low[R], high[R];
  for (int r = 0; r < R; ++r) low[r] = high[r] = broadcast(0.0f);
  for (int t = 0; t < num_tiles; ++t) {
    const uint16_t* values = tiles[t].values + 2 * d;
    for (int i = 0; i < kTile; i += 2, values += 2 * width) {
      const Pairs low_values = load_pairs(values), high_values = load_pairs(values + 2 * kLanes);
      const uint16_t* p = probs + t * kTile + i;
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Pairs pair = broadcast_pair(p + r * kChunk);
        low[r] = dot2(low[r], low_values, pair);
        high[r] = dot2(high[r], high_values, pair);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    store(out + r * width + d, low[r]);
    store(out + r * width + d + kLanes, high[r]);
  }
}

template <int R>
void score_rows(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  if constexpr (R > 0) {
    if (num_rows < R) return score_rows<R - 1>(tiles, num_tiles, q, num_rows, width, scores);
    int t = 0;
    for (; t + 2 <= num_tiles; t += 2) score_tiles<R, 2>(tiles + t, q, width, scores + t * kTile);
    if (t < num_tiles) score_tiles<R, 1>(tiles + t, q, width, scores + t * kTile);
    if (num_rows > R)
      score_rows<R>(tiles, num_tiles, q + R * kMaxHeadDim, num_rows - R, width, scores + R * kChunk);
  }
}

template <int R>
void weigh_rows(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  if constexpr (R > 0) {
    if (num_rows < R) return weigh_rows<R - 1>(tiles, num_tiles, probs, num_rows, width, out);
    for (int d = 0; d < width; d += 2 * kLanes) weigh_tiles<R>(tiles, num_tiles, probs, width, d, out);
    if (num_rows > R) weigh_rows<R>(tiles, num_tiles, probs + R * kChunk, num_rows - R, width, out + R * width);
  }
}

inline void score(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  score_rows<kPairRows>(tiles, num_tiles, q, num_rows, width, scores);
}

inline void weigh(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  weigh_rows<kPairRows>(tiles, num_tiles, probs, num_rows, width, out);
}

// Attention in the tile unit: keys lie as its second operand already, values as well, and queries and probabilities are
// rounded to bf16. Every row is summed in the unit's own fixed order, whatever rows stand beside it.

// Registers 0-3: sums [16 rows][16]; 4 and 5: operands of the first and of the last 16 rows; 6 and 7: what they meet.
// Scores sum over 32 dimensions of 16 keys at a time, weighted values over 16 tokens.
inline TileConfig make_attention_config(int depth) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i < 6 ? kRowTile : depth / 2);
    config.bytes_per_row[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth * 2 : 64);
  }
  return config;
}
static const TileConfig kScoreConfig = make_attention_config(32);
static const TileConfig kValueConfig = make_attention_config(kTile);

// To the nearest bf16, ties to even; by hand, because the processor's own conversion flushes small numbers.
inline F rounded(F x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return {_mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
}

inline void store_operand(uint16_t* p, F x) {
  const __m512i high = _mm512_srli_epi32(_mm512_castps_si512(x.v), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(high));
}

// scores [rows, kChunk] of q [rows, width] in bf16 against the keys of some tiles. There is room for two tiles of 16 rows,
// and each pair of key tiles is read once for both.
inline void score(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  constexpr int kStride = kMaxHeadDim * 2, kScoreStride = kChunk * 4;
  const uint16_t* more_q = q + kRowTile * kMaxHeadDim;
  float* more_scores = scores + kRowTile * kChunk;
  const bool has_more = num_rows > kRowTile;
  _tile_loadconfig(&kScoreConfig);
  for (int t = 0; t < num_tiles; t += 2) {
    const uint16_t* keys = tiles[t].keys;
    const uint16_t* more_keys = tiles[t + 1 < num_tiles ? t + 1 : t].keys;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int d = 0; d < width; d += 32) {
      _tile_loadd(4, q + d, kStride);
      _tile_loadd(6, keys + d * kTile, 64);
      _tile_loadd(7, more_keys + d * kTile, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (has_more) {
        _tile_loadd(5, more_q + d, kStride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, scores + t * kTile, kScoreStride);
    if (t + 1 < num_tiles) _tile_stored(1, scores + (t + 1) * kTile, kScoreStride);
    if (has_more) _tile_stored(2, more_scores + t * kTile, kScoreStride);
    if (has_more && t + 1 < num_tiles) _tile_stored(3, more_scores + (t + 1) * kTile, kScoreStride);
  }
  _tile_release();
}

// out [rows, width] = probs [rows, kChunk] in bf16 times the values of some tiles, 32 dimensions at a time.
inline void weigh(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  const uint16_t* more_probs = probs + kRowTile * kChunk;
  float* more_out = out + kRowTile * width;
  const bool has_more = num_rows > kRowTile;
  const int64_t stride = width * 4;
  _tile_loadconfig(&kValueConfig);
  for (int d = 0; d < width; d += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int t = 0; t < num_tiles; ++t) {
      const uint16_t* values = tiles[t].values + 2 * d;
      _tile_loadd(4, probs + t * kTile, kChunk * 2);
      _tile_loadd(6, values, stride);
      _tile_loadd(7, values + 2 * kLanes, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (has_more) {
        _tile_loadd(5, more_probs + t * kTile, kChunk * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, out + d, stride);
    _tile_stored(1, out + d + kLanes, stride);
    if (has_more) _tile_stored(2, more_out + d, stride);
    if (has_more) _tile_stored(3, more_out + d + kLanes, stride);
  }
  _tile_release();
}

// Attention in the tile unit: keys lie as its second operand already, values as well, and queries and probabilities are
// rounded to bf16. Every row is summed in the unit's own fixed order, whatever rows stand beside it.

constexpr int kRowsAtOnce = 2 * kRowTile;

// Registers 0-3: sums [rows][16]; 4 and 5: operands of the first 16 rows and of the others; 6 and 7: what they meet.
// Scores sum over 32 dimensions of 16 keys at a time, weighted values over 16 tokens. A row that is not there is not
// computed: the unit's time goes by rows.
inline TileConfig make_attention_config(int depth, int num_rows) {
  const int first = num_rows < kRowTile ? num_rows : kRowTile, more = num_rows > kRowTile ? num_rows - kRowTile : 1;
  const int rows[8] = {first, first, more, more, first, more, depth / 2, depth / 2};
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(rows[i]);
    config.bytes_per_row[i] = static_cast<uint16_t>(i == 4 || i == 5 ? depth * 2 : 64);
  }
  return config;
}

// scores [rows, kChunk] of at most 32 rows q [rows, width] in bf16 against the keys of some tiles; each pair of these is
// read once for both tiles of rows.
inline void score_at_once(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  constexpr int kStride = kMaxHeadDim * 2, kScoreStride = kChunk * 4;
  const uint16_t* more_q = q + kRowTile * kMaxHeadDim;
  float* more_scores = scores + kRowTile * kChunk;
  const bool has_more = num_rows > kRowTile;
  const TileConfig config = make_attention_config(32, num_rows);
  _tile_loadconfig(&config);
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

// out [rows, width] of at most 32 rows = probs [rows, kChunk] in bf16 times the values of some tiles, 32 dimensions at
// a time.
inline void weigh_at_once(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  const uint16_t* more_probs = probs + kRowTile * kChunk;
  float* more_out = out + kRowTile * width;
  const bool has_more = num_rows > kRowTile;
  const int64_t stride = width * 4;
  const TileConfig config = make_attention_config(kTile, num_rows);
  _tile_loadconfig(&config);
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

inline void score(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  for (int row = 0; row < num_rows; row += kRowsAtOnce) {
    const int left = num_rows - row;
    score_at_once(tiles, num_tiles, q + row * kMaxHeadDim, left < kRowsAtOnce ? left : kRowsAtOnce, width,
                  scores + row * kChunk);
  }
}

inline void weigh(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  for (int row = 0; row < num_rows; row += kRowsAtOnce) {
    const int left = num_rows - row;
    weigh_at_once(tiles, num_tiles, probs + row * kChunk, left < kRowsAtOnce ? left : kRowsAtOnce, width,
                  out + row * width);
  }
}

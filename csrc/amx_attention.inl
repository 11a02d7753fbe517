// Attention in the tile unit: keys lie as its second operand already, values as well, and queries and probabilities are
// rounded to bf16. Every row is summed in the unit's own fixed order, whatever rows stand beside it.

// Registers 0-3: sums [16 rows][16]; 4: queries or probabilities; 5: keys (32 dimensions); 6: values (16 tokens).
inline TileConfig make_attention_config() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = 16;
    config.bytes_per_row[i] = 64;
  }
  config.rows[6] = kTile / 2;
  config.rows[7] = 16;
  config.bytes_per_row[7] = kTile * 2;  // probabilities of 16 tokens
  return config;
}
static const TileConfig kAttentionConfig = make_attention_config();

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

// scores [rows, kChunk] of q [rows, width] in bf16 against the keys of some tiles; rows in whole tiles of 16.
inline void score(const Tile* tiles, int num_tiles, const uint16_t* q, int num_rows, int width, float* scores) {
  _tile_loadconfig(&kAttentionConfig);
  for (int row = 0; row < num_rows; row += 16) {
    for (int t = 0; t < num_tiles; ++t) {
      _tile_zero(0);
      int d = 0;
      for (; d + 32 <= width; d += 32) {
        _tile_loadd(4, q + row * kMaxHeadDim + d, kMaxHeadDim * 2);
        _tile_loadd(5, tiles[t].keys + d * kTile, 64);
        _tile_dpbf16ps(0, 4, 5);
      }
      if (d < width) {
        _tile_loadd(7, q + row * kMaxHeadDim + d, kMaxHeadDim * 2);
        _tile_loadd(6, tiles[t].keys + d * kTile, 64);
        _tile_dpbf16ps(0, 7, 6);
      }
      _tile_stored(0, scores + row * kChunk + t * kTile, kChunk * 4);
    }
  }
  _tile_release();
}

// out [rows, width] = probs [rows, kChunk] in bf16 times the values of some tiles.
inline void weigh(const Tile* tiles, int num_tiles, const uint16_t* probs, int num_rows, int width, float* out) {
  _tile_loadconfig(&kAttentionConfig);
  for (int row = 0; row < num_rows; row += 16) {
    for (int d = 0; d < width; d += 64) {
      const int columns = width - d < 64 ? width - d : 64;
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int t = 0; t < num_tiles; ++t) {
        const uint16_t* values = tiles[t].values + 2 * d;
        _tile_loadd(7, probs + row * kChunk + t * kTile, kChunk * 2);
        _tile_loadd(6, values, width * 4);
        _tile_dpbf16ps(0, 7, 6);
        if (columns > 16) {
          _tile_loadd(6, values + 32, width * 4);
          _tile_dpbf16ps(1, 7, 6);
        }
        if (columns > 32) {
          _tile_loadd(6, values + 64, width * 4);
          _tile_dpbf16ps(2, 7, 6);
        }
        if (columns > 48) {
          _tile_loadd(6, values + 96, width * 4);
          _tile_dpbf16ps(3, 7, 6);
        }
      }
      float* target = out + row * width + d;
      _tile_stored(0, target, width * 4);
      if (columns > 16) _tile_stored(1, target + 16, width * 4);
      if (columns > 32) _tile_stored(2, target + 32, width * 4);
      if (columns > 48) _tile_stored(3, target + 48, width * 4);
    }
  }
  _tile_release();
}

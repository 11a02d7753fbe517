// Products of many rows in the tile unit (AMX): integer sums are exact there too and the floats follow the same steps as
// in multiply_quantised, so the bits are the same and the two may be mixed at will.

// From this many rows on the tile unit is the faster one.
constexpr int kAmxRows = 6;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0 and 1: sums of 16 and of 8 rows; 2 and 3: 32 codes of as many rows; 4: the codes of a panel.
inline TileConfig make_linear_config() {
  TileConfig config;
  const uint8_t rows[5] = {16, 8, 16, 8, kGroup / 4};
  const uint16_t bytes[5] = {64, 64, kGroup, kGroup, 64};
  for (int i = 0; i < 5; ++i) {
    config.rows[i] = rows[i];
    config.bytes_per_row[i] = bytes[i];
  }
  return config;
}
static const TileConfig kLinearConfig = make_linear_config();

// One panel, its codes unpacked to bytes, times the first Count rows of a tile.
template <int Count>
inline void multiply_tile(const uint8_t* panel, int64_t panel_step, const uint8_t* codes, const uint8_t* tile,
                          int num_groups, F* acc) {
  alignas(64) int32_t sums[2][Count * kPanel];
  for (int r = 0; r < Count; ++r) acc[r] = broadcast(0.0f);
  for (int g = 0; g < num_groups; ++g) {
    int32_t* sum = sums[g % 2];
    _tile_loadd(4, codes, 64);
    if constexpr (Count == 16) {
      _tile_loadd(2, tile, kGroup);
      _tile_zero(0);
      _tile_dpbsud(0, 2, 4);
      _tile_stored(0, sum, 64);
    } else {
      _tile_loadd(3, tile, kGroup);
      _tile_zero(1);
      _tile_dpbsud(1, 3, 4);
      _tile_stored(1, sum, 64);
    }
    const F scale = load_half(reinterpret_cast<const uint16_t*>(panel));
    const F minimum = load_half(reinterpret_cast<const uint16_t*>(panel) + kPanel);
    const float* scales = reinterpret_cast<const float*>(tile + kRowTile * kGroup);
#pragma GCC unroll 16
    for (int r = 0; r < Count; ++r) {
      const F product = {_mm512_cvtepi32_ps(_mm512_load_si512(sum + r * kPanel))};
      acc[r] = fma(product, mul(scale, broadcast(scales[r])), acc[r]);
      acc[r] = fma(minimum, broadcast(scales[kRowTile + r]), acc[r]);
    }
    panel += panel_step;
    codes += kGroup * kPanel;
    tile += kRowTile * (kGroup + 8);
  }
}

constexpr int kAmxInputs = 1 << 15;  // as many as there is room for the unpacked codes of a panel

void linear_amx(const Panels& weight, int first, int last, const Rows& rows, int num_rows, const Output& out) {
  alignas(64) static thread_local uint8_t unpacked[kAmxInputs * kPanel];
  const int bits = static_cast<int>(weight.format);
  const int64_t step = 4 * kPanel + kGroup * kPanel * bits / 8;
  _tile_loadconfig(&kLinearConfig);
  for (int p = first; p < last; ++p) {
    const uint8_t* panel = weight.data + weight.panel_bytes() * p;
    uint8_t* codes = unpacked;
    for (int g = 0; g < weight.num_groups; ++g, codes += kGroup * kPanel) {
      const uint8_t* packed = panel + step * g + 4 * kPanel;
      for (int quad = 0; quad < 8; ++quad) {
        const Codes w = bits == 8  ? load_codes(packed + 64 * quad)
                        : quad < 4 ? low_nibbles(packed + 64 * quad)
                                   : high_nibbles(packed + 64 * (quad - 4));
        _mm512_store_si512(codes + 64 * quad, w.v);
      }
      __builtin_prefetch(packed + step * 8);
    }
    for (int row = 0; row < num_rows; row += kRowTile) {
      const uint8_t* tile = rows.data + rows.tile_bytes() * (row / kRowTile);
      const int left = num_rows - row;
      F product[kRowTile];
      if (left > 8)
        multiply_tile<16>(panel, step, unpacked, tile, rows.num_groups, product);
      else
        multiply_tile<8>(panel, step, unpacked, tile, rows.num_groups, product);
      for (int r = 0; r < left && r < kRowTile; ++r) write_outputs(weight, p, row + r, product[r], out);
    }
  }
  _tile_release();
}

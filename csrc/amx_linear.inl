// Products of many rows in the tile unit (AMX): integer sums are exact there too and the floats follow the same steps as
// in multiply_quantised, so the bits are the same and the two may be mixed at will.

// With fewer rows the vector unit is as fast, and needs no 4-bit codes unpacked.
constexpr int kAmxRows = 32;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0-3: sums of 16 rows; 4 and 5: 32 codes of as many rows; 6 and 7: the codes of a panel.
constexpr TileConfig make_linear_config() {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = i < 6 ? kRowTile : kGroup / 4;
    config.bytes_per_row[i] = i == 4 || i == 5 ? kGroup : 64;
  }
  return config;
}
constexpr TileConfig kLinearConfig = make_linear_config();

// The integer sums of one group into register `Sum`.
template <int Sum>
inline void sum_products(const uint8_t* rows, const uint8_t* codes) {
  if constexpr (Sum % 2 == 0) {
    _tile_loadd(4, rows, kGroup);
    _tile_loadd(6, codes, 64);
  } else {
    _tile_loadd(5, rows, kGroup);
    _tile_loadd(7, codes, 64);
  }
  if constexpr (Sum == 0) {
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
  } else if constexpr (Sum == 1) {
    _tile_zero(1);
    _tile_dpbsud(1, 5, 7);
  } else if constexpr (Sum == 2) {
    _tile_zero(2);
    _tile_dpbsud(2, 4, 6);
  } else {
    _tile_zero(3);
    _tile_dpbsud(3, 5, 7);
  }
}

// One panel, its codes as bytes with `codes_step` from group to group, times a tile of rows, four groups at a time. The
// first tile of a panel asks for the weights to come. Sums leave the tile unit through memory, and a load that comes
// soon after a tile's store waits until the store has reached the cache: so the sums of four groups are scaled while the
// unit works on the next four.
inline void multiply_tile(const uint8_t* panel, int64_t panel_step, const uint8_t* codes, int64_t codes_step,
                          const uint8_t* tile, int num_groups, bool is_first, F* out) {
  constexpr int kGroupBytes = kRowTile * (kGroup + 8);
  alignas(64) int32_t sums[2][4][kRowTile * kPanel];
  F acc[kRowTile];
  for (int r = 0; r < kRowTile; ++r) acc[r] = broadcast(0.0f);
  for (int first = 0; first < num_groups + 4; first += 4) {
    const uint8_t* rows = tile + kGroupBytes * first;
    const uint8_t* group_codes = codes + codes_step * first;
    const int left = num_groups - first;
    if (left > 0) sum_products<0>(rows, group_codes);
    if (left > 1) sum_products<1>(rows + kGroupBytes, group_codes + codes_step);
    if (left > 2) sum_products<2>(rows + 2 * kGroupBytes, group_codes + 2 * codes_step);
    if (left > 3) sum_products<3>(rows + 3 * kGroupBytes, group_codes + 3 * codes_step);

    for (int g = first < 4 ? 0 : first - 4; g < first && g < num_groups; ++g) {
      const int32_t* sum = sums[g / 4 % 2][g % 4];
      const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + panel_step * g);
      if (is_first) prefetch(panel + panel_step * g + kAhead, panel_step);
      const F scale = load_half(halves), minimum = load_half(halves + kPanel);
      const float* scales = reinterpret_cast<const float*>(tile + kGroupBytes * g + kRowTile * kGroup);
#pragma GCC unroll 16
      for (int r = 0; r < kRowTile; ++r) {
        const F product = {_mm512_cvtepi32_ps(_mm512_load_si512(sum + r * kPanel))};
        acc[r] = fma(product, mul(scale, broadcast(scales[r])), acc[r]);
        acc[r] = fma(minimum, broadcast(scales[kRowTile + r]), acc[r]);
      }
    }

    auto& stored = sums[first / 4 % 2];
    if (left > 0) _tile_stored(0, stored[0], 64);
    if (left > 1) _tile_stored(1, stored[1], 64);
    if (left > 2) _tile_stored(2, stored[2], 64);
    if (left > 3) _tile_stored(3, stored[3], 64);
  }
  for (int r = 0; r < kRowTile; ++r) out[r] = acc[r];
}

constexpr int kBlock = 2;            // panels that meet a tile of rows while it is in the nearest cache
constexpr int kAmxInputs = 1 << 15;  // as many as there is room for the unpacked codes of a panel

// The 4-bit codes of a panel as bytes, group after group.
inline void unpack_codes(const uint8_t* panel, int64_t step, int num_groups, uint8_t* codes) {
  for (int g = 0; g < num_groups; ++g, codes += kGroup * kPanel) {
    const uint8_t* packed = panel + step * g + 4 * kPanel;
    for (int quad = 0; quad < 4; ++quad) {
      _mm512_store_si512(codes + 64 * quad, low_nibbles(packed + 64 * quad).v);
      _mm512_store_si512(codes + 64 * (quad + 4), high_nibbles(packed + 64 * quad).v);
    }
  }
}

void linear_amx(const Panels& weight, int first, int last, const Rows& rows, int num_rows, const Output& out) {
  alignas(64) static thread_local uint8_t unpacked[kBlock][kAmxInputs * kPanel];
  const int64_t step = 4 * kPanel + kGroup * kPanel * static_cast<int>(weight.format) / 8;
  const bool is_packed = weight.format == Format::kInt4;
  const int64_t codes_step = is_packed ? kGroup * kPanel : step;
  _tile_loadconfig(&kLinearConfig);
  for (int start = first; start < last; start += kBlock) {
    const int num_panels = last - start < kBlock ? last - start : kBlock;
    const uint8_t* panels = weight.data + weight.panel_bytes() * start;
    for (int p = 0; is_packed && p < num_panels; ++p)
      unpack_codes(panels + weight.panel_bytes() * p, step, weight.num_groups, unpacked[p]);
    for (int row = 0; row < num_rows; row += kRowTile) {
      const uint8_t* tile = rows.data + rows.tile_bytes() * (row / kRowTile);
      for (int p = 0; p < num_panels; ++p) {
        const uint8_t* panel = panels + weight.panel_bytes() * p;
        const uint8_t* codes = is_packed ? unpacked[p] : panel + 4 * kPanel;
        F product[kRowTile];
        multiply_tile(panel, step, codes, codes_step, tile, rows.num_groups, row == 0, product);
        for (int r = 0; r < kRowTile && row + r < num_rows; ++r) write_outputs(weight, start + p, row + r, product[r], out);
      }
    }
  }
  _tile_release();
}

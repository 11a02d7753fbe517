// Products of many rows in the tile unit (AMX): integer sums are exact there too and the floats follow the same steps as
// in multiply_quantised, so the bits are the same and the two may be mixed at will.

// With fewer rows the vector unit, which needs no 4-bit codes unpacked, is as fast.
constexpr int kAmxRows = 9;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Registers 0-3: sums of `num_rows` rows; 4 and 5: 32 codes of as many rows; 6 and 7: the codes of a panel.
constexpr TileConfig make_linear_config(int num_rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.rows[i] = static_cast<uint8_t>(i < 6 ? num_rows : kGroup / 4);
    config.bytes_per_row[i] = i == 4 || i == 5 ? kGroup : 64;
  }
  return config;
}
template <int R>
constexpr TileConfig kLinearConfig = make_linear_config(R);

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

template <int Sum>
inline void store_sums(int32_t* out) {
  if constexpr (Sum == 0) _tile_stored(0, out, 64);
  if constexpr (Sum == 1) _tile_stored(1, out, 64);
  if constexpr (Sum == 2) _tile_stored(2, out, 64);
  if constexpr (Sum == 3) _tile_stored(3, out, 64);
}

// Sums leave the tile unit through memory. They are stored two groups after they were begun, when the unit has them,
// and scaled two groups after that: a load that comes soon after a tile's store waits until the store has reached the
// cache. For the same reason 4-bit codes are unpacked four groups before the unit reads them.
constexpr int kStoreAfter = 2, kScaleAfter = 4, kUnpackBefore = 4, kInFlight = 8;

// The 4-bit codes of a group as bytes.
inline void unpack_group(const uint8_t* packed, uint8_t* codes) {
  for (int quad = 0; quad < 4; ++quad) {
    _mm512_store_si512(codes + 64 * quad, low_nibbles(packed + 64 * quad).v);
    _mm512_store_si512(codes + 64 * (quad + 4), high_nibbles(packed + 64 * quad).v);
  }
}

// What stands between a panel and the first R rows of a tile.
struct Workspace {
  alignas(64) int32_t sums[kInFlight][kRowTile * kPanel];
  alignas(64) uint8_t codes[kInFlight][kGroup * kPanel];
};

template <int R>
inline void scale_sums(const uint8_t* group, const uint8_t* rows, const int32_t* sums, F* acc) {
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(group);
  const F scale = load_half(halves), minimum = load_half(halves + kPanel);
  const float* scales = reinterpret_cast<const float*>(rows + kRowTile * kGroup);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const F product = {_mm512_cvtepi32_ps(_mm512_load_si512(sums + r * kPanel))};
    acc[r] = fma(product, mul(scale, broadcast(scales[r])), acc[r]);
    acc[r] = fma(minimum, broadcast(scales[kRowTile + r]), acc[r]);
  }
}

// One panel times the first R rows of a tile. `codes` are those of the panel as bytes, `codes_step` from group to group;
// null: they have 4 bits, and each group is unpacked when it is due.
template <int R>
inline void multiply_tile(const uint8_t* panel, int64_t step, const uint8_t* codes, int64_t codes_step,
                          const uint8_t* tile, int num_groups, Workspace& work, F* out) {
  constexpr int64_t kRowStep = kRowTile * (kGroup + 8);
  const bool is_packed = codes == nullptr;
  F acc[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = broadcast(0.0f);
  for (int g = 0; is_packed && g < kUnpackBefore && g < num_groups; ++g)
    unpack_group(panel + step * g + 4 * kPanel, work.codes[g]);

  const auto advance = [&]<int Sum>(int g) __attribute__((always_inline)) {  // g % 4 is Sum
    const int unpacked = g + kUnpackBefore, stored = g - kStoreAfter, scaled = g - kScaleAfter;
    if (stored >= 0 && stored < num_groups) store_sums<(Sum + 4 - kStoreAfter) % 4>(work.sums[stored % kInFlight]);
    if (g < num_groups) {
      sum_products<Sum>(tile + kRowStep * g, is_packed ? work.codes[g % kInFlight] : codes + codes_step * g);
      prefetch(panel + step * g + kAhead, step);
    }
    if (is_packed && unpacked < num_groups)
      unpack_group(panel + step * unpacked + 4 * kPanel, work.codes[unpacked % kInFlight]);
    if (scaled >= 0 && scaled < num_groups)
      scale_sums<R>(panel + step * scaled, tile + kRowStep * scaled, work.sums[scaled % kInFlight], acc);
  };
  for (int g = 0; g < num_groups + kScaleAfter; g += 4) {
    advance.template operator()<0>(g);
    advance.template operator()<1>(g + 1);
    advance.template operator()<2>(g + 2);
    advance.template operator()<3>(g + 3);
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) out[r] = acc[r];
}

constexpr int kAmxInputs = 1 << 15;  // as many as there is room for the unpacked codes of a panel

template <int R>
void linear_in_tiles(const Panels& weight, int first, int last, const Rows& rows, int num_rows, const Output& out) {
  alignas(64) static thread_local uint8_t unpacked[kAmxInputs * kPanel];
  Workspace work;
  const bool is_packed = weight.format == Format::kInt4, has_many = num_rows > R && weight.num_inputs <= kAmxInputs;
  const int64_t step = 4 * kPanel + kGroup * kPanel * static_cast<int>(weight.format) / 8;
  _tile_loadconfig(&kLinearConfig<R>);
  for (int p = first; p < last; ++p) {
    const uint8_t* panel = weight.data + weight.panel_bytes() * p;
    const uint8_t* codes = is_packed ? nullptr : panel + 4 * kPanel;
    if (is_packed && has_many) {  // unpacked once for all tiles
      for (int g = 0; g < weight.num_groups; ++g)
        unpack_group(panel + step * g + 4 * kPanel, unpacked + kGroup * kPanel * g);
      codes = unpacked;
    }
    int row = 0;
    for (; num_rows - row >= kAmxRows; row += R) {
      const uint8_t* tile = rows.data + rows.tile_bytes() * (row / kRowTile);
      F product[R];
      multiply_tile<R>(panel, step, codes, is_packed ? kGroup * kPanel : step, tile, rows.num_groups, work, product);
      for (int r = 0; r < R && row + r < num_rows; ++r) write_outputs(weight, p, row + r, product[r], out);
    }
    if (row < num_rows) multiply_rest<1, kAmxRows - 1>(weight, p, rows, row, num_rows - row, out);
  }
  _tile_release();
}

void linear_amx(const Panels& weight, int first, int last, const Rows& rows, int num_rows, const Output& out) {
  if (num_rows <= 12) return linear_in_tiles<12>(weight, first, last, rows, num_rows, out);
  linear_in_tiles<kRowTile>(weight, first, last, rows, num_rows, out);
}

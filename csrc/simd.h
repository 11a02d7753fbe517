// Sixteen lanes at a time, the same for every instruction set. Included by kernels.inl only, once per instruction set,
// inside an anonymous namespace: no function here may be seen by the linker, or code compiled for AVX-512 could be the
// copy that an older processor runs. For the same reason whatever lives outside functions is constexpr: what is made when
// the module is loaded would be made with AVX-512 on every processor.
//
// Products and sums round the same everywhere; `fma` rounds once where the processor has it, so the bits of a result
// belong to an instruction set.

static constexpr int kLanes = 16;

#if defined(__AVX512VNNI__)

struct F { __m512 v; };
struct I { __m512i v; };
struct Codes { __m512i v; };  // 16 outputs x 4 unsigned bytes
static constexpr int kMaxRows = 8;  // whose sums and totals stay in registers
static constexpr int kPairedRows = 4;  // the same with two panels at a time; 0: too few registers
static constexpr int kMaxFloatRows = 8;
#if defined(__AMX_INT8__)
static constexpr const char* kIsa = "amx";
#elif defined(__AVX512BF16__)
static constexpr const char* kIsa = "avx512bf16";
#else
static constexpr const char* kIsa = "avx512";
#endif

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline F load_first(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store_first(float* p, F x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
inline F broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I round(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I broadcast_int(int x) { return {_mm512_set1_epi32(x)}; }
inline F nearest(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT)}; }
// p * 2^n for whole n; 0 where the power is below the normal numbers.
inline F times_power(F p, F n) {
  const __mmask16 is_normal = _mm512_cmp_ps_mask(n.v, _mm512_set1_ps(-126.0f), _CMP_GE_OQ);
  return {_mm512_maskz_scalef_ps(is_normal, p.v, n.v)};
}
inline void store_bytes(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Of 16 pairs of bfloat16 the first or the second of each.
inline F load_even_bf16(const uint16_t* p) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))}; }
inline F load_odd_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(0xffff0000)))};
}
inline Codes load_codes(const uint8_t* p) { return {_mm512_load_si512(p)}; }
inline Codes low_nibbles(const uint8_t* p) { return {_mm512_and_si512(_mm512_load_si512(p), _mm512_set1_epi8(15))}; }
inline Codes high_nibbles(const uint8_t* p) {
  return {_mm512_and_si512(_mm512_srli_epi16(_mm512_load_si512(p), 4), _mm512_set1_epi8(15))};
}
struct Quad { __m512i v; };  // four signed bytes, in every lane
inline Quad load_quad(const int8_t* x) {
  int quad;
  __builtin_memcpy(&quad, x, 4);
  return {_mm512_set1_epi32(quad)};
}
inline I dot4(I sum, Codes w, Quad x) { return {_mm512_dpbusd_epi32(sum.v, w.v, x.v)}; }

#elif defined(__AVX2__)

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct Codes { __m256i a, b; };  // 16 outputs x 4 bytes
static constexpr int kMaxRows = 4;
static constexpr int kPairedRows = 0;
static constexpr int kMaxFloatRows = 3;
static constexpr const char* kIsa = "avx2";

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
inline F load_first(const float* p, int n) {
  float full[kLanes] = {};
  for (int i = 0; i < n; ++i) full[i] = p[i];
  return load(full);
}
inline void store_first(float* p, F x, int n) {
  float full[kLanes];
  store(full, x);
  for (int i = 0; i < n; ++i) p[i] = full[i];
}
inline F broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 mask = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, mask), _mm256_and_ps(x.b, mask)};
}
inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I broadcast_int(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F shift_exponent(I x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x.a, 23)), _mm256_castsi256_ps(_mm256_slli_epi32(x.b, 23))};
}
inline void store_bytes(int8_t* p, I x) {
  const __m256i lowest = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i a = _mm256_shuffle_epi8(x.a, lowest), b = _mm256_shuffle_epi8(x.b, lowest);
  const __m256i places = _mm256_setr_epi32(0, 4, 1, 1, 1, 1, 1, 1);
  const __m128i low = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(a, places));
  const __m128i high = _mm256_castsi256_si128(_mm256_permutevar8x32_epi32(b, places));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi64(low, high));
}
inline F load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
inline F load_even_bf16(const uint16_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(q + 1), 16))};
}
inline F load_odd_bf16(const uint16_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi32(0xffff0000);
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q), mask)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(q + 1), mask))};
}
inline Codes low_nibbles(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_load_si256(q), mask), _mm256_and_si256(_mm256_load_si256(q + 1), mask)};
}
inline Codes high_nibbles(const uint8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(_mm256_load_si256(q), 4), mask),
          _mm256_and_si256(_mm256_srli_epi16(_mm256_load_si256(q + 1), 4), mask)};
}

// Adds to each 16-bit sum two products of a nibble and a byte. The empty statement keeps the compiler from multiplying
// several rows before it adds one, which takes more registers than there are.
inline I add_pairs(I sum, const Codes& w, const int8_t* x) {
  int quad;
  __builtin_memcpy(&quad, x, 4);
  const __m256i four = _mm256_set1_epi32(quad);
  sum.a = _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(w.a, four));
  sum.b = _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(w.b, four));
  asm volatile("" : "+x"(sum.a), "+x"(sum.b));
  return sum;
}
// Sums of neighbours, times a number of at most 16 bits.
inline I widen(I pairs, int factor) {
  const __m256i times = _mm256_set1_epi16(static_cast<short>(factor));
  return {_mm256_madd_epi16(pairs.a, times), _mm256_madd_epi16(pairs.b, times)};
}

#else  // portable C++

struct F { float v[kLanes]; };
struct I { int32_t v[kLanes]; };
struct Codes { uint8_t v[64]; };
static constexpr int kMaxRows = 2;
static constexpr int kPairedRows = 0;
static constexpr int kMaxFloatRows = 2;
static constexpr const char* kIsa = "portable";

#define EACH(expression)                        \
  for (int i = 0; i < kLanes; ++i) expression;  \
  return r;
inline F load(const float* p) { F r; EACH(r.v[i] = p[i]) }
inline void store(float* p, const F& x) { for (int i = 0; i < kLanes; ++i) p[i] = x.v[i]; }
inline F load_first(const float* p, int n) { F r; EACH(r.v[i] = i < n ? p[i] : 0.0f) }
inline void store_first(float* p, const F& x, int n) { for (int i = 0; i < n; ++i) p[i] = x.v[i]; }
inline F broadcast(float x) { F r; EACH(r.v[i] = x) }
inline F add(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] + b.v[i]) }
inline F sub(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] - b.v[i]) }
inline F mul(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] * b.v[i]) }
inline F div(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] / b.v[i]) }
inline F fma(const F& a, const F& b, const F& c) { F r; EACH(r.v[i] = a.v[i] * b.v[i] + c.v[i]) }
inline F max(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]) }
inline F min(const F& a, const F& b) { F r; EACH(r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]) }
inline F abs(const F& a) { F r; EACH(r.v[i] = __builtin_fabsf(a.v[i])) }
inline F to_float(const I& a) { F r; EACH(r.v[i] = static_cast<float>(a.v[i])) }
inline I round(const F& a) {
  // Adding and taking away 1.5 * 2^23 rounds to nearest, ties to even, for all values that occur here. What is none of
  // them (a broken model's NaN) becomes the smallest number, as it does in the vector units.
  I r;
  for (int i = 0; i < kLanes; ++i) {
    const float nearest = (a.v[i] + 12582912.0f) - 12582912.0f;
    r.v[i] = nearest > -2e9f && nearest < 2e9f ? static_cast<int32_t>(nearest) : INT32_MIN;
  }
  return r;
}
inline I add(const I& a, const I& b) {  // wraps, as in the vector units
  I r;
  EACH(r.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i])))
}
inline I broadcast_int(int x) { I r; EACH(r.v[i] = x) }
inline F shift_exponent(const I& a) {
  F r;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = static_cast<uint32_t>(a.v[i]) << 23;
    __builtin_memcpy(&r.v[i], &bits, 4);
  }
  return r;
}
inline void store_bytes(int8_t* p, const I& a) { for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]); }
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff;
  // A shifted half is the number times 2^-112 as a float; multiplying by 2^112 also normalises subnormals.
  uint32_t bits = magnitude << 13;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  value *= 0x1p112f;
  __builtin_memcpy(&bits, &value, 4);
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline F load_half(const uint16_t* p) { F r; EACH(r.v[i] = half_to_float(p[i])) }
inline float bf16_to_float(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline F load_even_bf16(const uint16_t* p) { F r; EACH(r.v[i] = bf16_to_float(p[2 * i])) }
inline F load_odd_bf16(const uint16_t* p) { F r; EACH(r.v[i] = bf16_to_float(p[2 * i + 1])) }
#undef EACH
inline Codes load_codes(const uint8_t* p) {
  Codes r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
inline Codes low_nibbles(const uint8_t* p) {
  Codes r;
  for (int i = 0; i < 64; ++i) r.v[i] = p[i] & 15;
  return r;
}
inline Codes high_nibbles(const uint8_t* p) {
  Codes r;
  for (int i = 0; i < 64; ++i) r.v[i] = p[i] >> 4;
  return r;
}
using Quad = const int8_t*;
inline Quad load_quad(const int8_t* x) { return x; }
inline I dot4(I sum, const Codes& w, Quad x) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < 4; ++j) sum.v[i] += static_cast<int32_t>(w.v[4 * i + j]) * x[j];
  return sum;
}
#endif

// No load moves across it: sixteen registers hold what one half of a loop needs, not both.
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
inline void keep_order() { asm volatile("" ::: "memory"); }
#else
inline void keep_order() {}
#endif

#if !defined(__AVX512VNNI__)
inline F nearest(F a) { return to_float(round(a)); }
// p * 2^n for whole n from -128 on; 0 where the power is below the normal numbers, whose exponent field is 0.
inline F times_power(F p, F n) {
  return mul(p, shift_exponent(round(max(add(n, broadcast(127.0f)), broadcast(0.0f)))));
}
#endif

// Sixteen lanes to one number, always in the order of this tree: halves are folded until one lane is left.
#if defined(__AVX512VNNI__)
template <typename Fold8, typename Fold4>
inline float fold_lanes(F x, Fold8 fold8, Fold4 fold4) {
  const __m256 eight = fold8(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 four = fold4(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = fold4(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(fold4(two, _mm_movehdup_ps(two)));
}
inline float first_lane(F x) { return _mm512_cvtss_f32(x.v); }
inline float sum_lanes(F x) {
  return fold_lanes(x, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); },
                    [](__m128 a, __m128 b) { return _mm_add_ps(a, b); });
}
inline float max_lanes(F x) {
  return fold_lanes(x, [](__m256 a, __m256 b) { return _mm256_max_ps(a, b); },
                    [](__m128 a, __m128 b) { return _mm_max_ps(a, b); });
}
#else
inline float first_lane(F x) {
  float lane[kLanes];
  store(lane, x);
  return lane[0];
}
inline float sum_lanes(F x) {
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  return lane[0];
}
inline float max_lanes(F x) {
  float lane[kLanes];
  store(lane, x);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  return lane[0];
}
#endif

// What attention with operands in bf16 shares, by the tile unit or by pairs: queries and probabilities are rounded to
// bf16, and exponentials need not be more exact than that.

using Operand = uint16_t;

// Two times 16 numbers to the nearest bf16, ties to even; what is below the normal numbers becomes 0.
inline void store_operands(Operand* p, F low, F high) {
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v)));
}

// e^x for x <= 0, for a probability that is rounded to bf16 next: relative error below 6e-6, far below the rounding's.
inline F soft_exp(F x) {
  constexpr float kLn2 = 0.693147180559945309f;
  const F n = nearest(mul(x, broadcast(kLog2E)));
  const F r = fma(n, broadcast(-kLn2), x);
  F p = broadcast(4.127635e-2f);
  p = fma(p, r, broadcast(1.6753246e-1f));
  p = fma(p, r, broadcast(0.50005101f));
  p = fma(p, r, broadcast(1.0f));
  return times_power(fma(p, r, broadcast(1.0f)), n);
}

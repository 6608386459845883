// exp and tanh on vectors, float32, within 2 units in the last place.
#pragma once

#include "vec.h"

namespace directkv::cpu {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// For x <= 88. -inf gives 0, NaN gives NaN; results below 2^-126 are flushed to 0.
DIRECTKV_INLINE VF exp_vec(VF x) {
  // x = n ln 2 + r. Adding 1.5 * 2^23 leaves round(x / ln 2) in the low mantissa bits.
  const VF magic = splat(12582912.0f);
  const VF clamped = x < -87.5f ? splat(-87.5f) : x;
  const VF shifted = fma(clamped, splat(1.44269504088896341f), magic);
  const VF n = shifted - magic;
  VF r = fma(n, splat(-0.693359375f), clamped);
  r = fma(n, splat(2.12194440e-4f), r);
  // Cephes' expf: e^r = 1 + r + r^2 P(r) for |r| <= ln 2 / 2.
  VF p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  // 2^n by its exponent bits. A product, because it keeps a NaN in p where integer bits would not.
  const VU exponent = (bits<VU>(shifted) - 0x4b400000u + 127u) << 23;
  return x < -87.33654f ? splat(0.0f) : p * bits<VF>(exponent);
}

DIRECTKV_INLINE VF tanh_vec(VF x) {
  const VU sign = bits<VU>(x) & 0x80000000u;
  VF a = bits<VF>(bits<VU>(x) & 0x7fffffffu);
  const VF big = a > 44.0f ? splat(44.0f) : a;
  const VF far = 1.0f - 2.0f / (exp_vec(big + big) + 1.0f);
  // Near 0 the difference above cancels: Cephes' odd polynomial.
  const VF z = x * x;
  VF p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  p = fma(p * z, x, x);
  return a < 0.625f ? p : bits<VF>(bits<VU>(far) | sign);
}

}  // namespace
}  // namespace directkv::cpu

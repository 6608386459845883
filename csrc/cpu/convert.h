// float32 to the cache dtypes, rounded to nearest even; NaN stays NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../page_layout.h"

namespace directkv::cpu {

inline uint16_t to_bf16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  // Rounding up the mantissa of a NaN could carry into inf.
  return static_cast<uint16_t>((u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40u : rounded);
}

inline uint16_t to_f16(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // 65520 and above round to inf
  if (u < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the units of the sum's mantissa with 2^-24 and rounds.
    float magnitude;
    std::memcpy(&magnitude, &u, 4);
    magnitude += 0.5f;
    std::memcpy(&u, &magnitude, 4);
    return static_cast<uint16_t>(sign | (u - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}

// to[i] = from[i] * factor.
inline void write_scaled(DType dtype, const float* from, float factor, int64_t n, void* to) {
  if (dtype == DType::kF32) {
    float* out = static_cast<float*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = from[i] * factor;
  } else if (dtype == DType::kBF16) {
    uint16_t* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(from[i] * factor);
  } else {
    uint16_t* out = static_cast<uint16_t*>(to);
    for (int64_t i = 0; i < n; ++i) out[i] = to_f16(from[i] * factor);
  }
}

inline void fill_nan(DType dtype, int64_t n, void* to) {
  if (dtype == DType::kF32) {
    for (int64_t i = 0; i < n; ++i) static_cast<float*>(to)[i] = NAN;
  } else {
    const uint16_t quiet = dtype == DType::kBF16 ? 0x7fc0 : 0x7e00;
    for (int64_t i = 0; i < n; ++i) static_cast<uint16_t*>(to)[i] = quiet;
  }
}

}  // namespace directkv::cpu

// Cache dtypes one element at a time, by arithmetic rather than by bit tricks: the tests' own.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../../csrc/page_layout.h"

namespace directkv::test {

inline double decode16(DType dtype, uint16_t h) {
  const int exponent_bits = dtype == DType::kBF16 ? 8 : 5, mantissa_bits = 15 - exponent_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1, top = (1 << exponent_bits) - 1;
  const int exponent = (h >> mantissa_bits) & top, mantissa = h & ((1 << mantissa_bits) - 1);
  const double sign = h & 0x8000 ? -1.0 : 1.0;
  if (exponent == top) return mantissa ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Element i of an array.
inline double decode(DType dtype, const void* base, int64_t i) {
  if (dtype == DType::kF32) {
    float f;
    std::memcpy(&f, static_cast<const char*>(base) + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, static_cast<const char*>(base) + 2 * i, 2);
  return decode16(dtype, h);
}

// For ordinary numbers and NaN; towards zero, which is enough to make test data.
inline void encode(DType dtype, void* base, int64_t i, double x) {
  if (dtype == DType::kF32) {
    const float f = static_cast<float>(x);
    std::memcpy(static_cast<char*>(base) + 4 * i, &f, 4);
    return;
  }
  const int mantissa_bits = dtype == DType::kBF16 ? 7 : 10;
  const int bias = dtype == DType::kBF16 ? 127 : 15;
  uint16_t h = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) {
    h |= 0x7fff;
  } else if (std::isinf(x)) {
    h |= (2 * bias + 1) << mantissa_bits;
  } else if (x != 0.0) {
    int exponent;
    const double fraction = std::frexp(std::fabs(x), &exponent) * 2 - 1;  // |x| = (1+f) 2^(e-1)
    const int biased = exponent - 1 + bias;
    if (biased > 0) {
      h |= biased << mantissa_bits | static_cast<int>(fraction * (1 << mantissa_bits));
    }
  }
  std::memcpy(static_cast<char*>(base) + 2 * i, &h, 2);
}

}  // namespace directkv::test

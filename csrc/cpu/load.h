// Loads of 2 * kLanes elements of a cache dtype as two float32 vectors.
//
// Which element lands in which slot is each type's own choice (bfloat16 splits into even and odd
// elements, because a shift and a mask widen it in place): queries, keys and values use the same
// order, and `element_of_slot` undoes it once, when the result is written.
#pragma once

#include "../page_layout.h"
#include "vec.h"

namespace directkv::cpu {
namespace {

constexpr int kUnit = 2 * kLanes;  // elements per load

struct Pair {
  VF a;
  VF b;
};

// The first `n` of the kUnit elements of 16 bits; the rest reads as zero and is not touched.
DIRECTKV_INLINE VU load_tail16(const void* p, int n) {
#if DIRECTKV_LANES == 16
  return bits<VU>(_mm512_maskz_loadu_epi16((1u << n) - 1u, p));
#else
  uint16_t raw[kUnit] = {};
  __builtin_memcpy(raw, p, sizeof(uint16_t) * n);
  return load_as<VU>(raw);
#endif
}

template <DType kType>
struct Format;

template <>
struct Format<DType::kBF16> {
  static constexpr int kBytes = 2;
  DIRECTKV_INLINE Pair expand(VU raw) { return {bits<VF>(raw << 16), bits<VF>(raw & 0xffff0000u)}; }
  DIRECTKV_INLINE Pair load(const char* p) { return expand(load_as<VU>(p)); }
  DIRECTKV_INLINE Pair load_tail(const char* p, int n) { return expand(load_tail16(p, n)); }
  static int element_of_slot(int slot) {
    return slot < kLanes ? 2 * slot : 2 * (slot - kLanes) + 1;
  }
};

template <>
struct Format<DType::kF16> {
  static constexpr int kBytes = 2;
#if DIRECTKV_LANES == 16
  DIRECTKV_INLINE Pair expand(VU raw) {
    const __m512i x = bits<__m512i>(raw);
    return {bits<VF>(_mm512_cvtph_ps(_mm512_castsi512_si256(x))),
            bits<VF>(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)))};
  }
  static int element_of_slot(int slot) { return slot; }
#elif DIRECTKV_LANES == 8 && defined(__F16C__)
  DIRECTKV_INLINE Pair expand(VU raw) {
    const __m256i x = bits<__m256i>(raw);
    return {bits<VF>(_mm256_cvtph_ps(_mm256_castsi256_si128(x))),
            bits<VF>(_mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)))};
  }
  static int element_of_slot(int slot) { return slot; }
#elif DIRECTKV_LANES == 4 && defined(__aarch64__)
  DIRECTKV_INLINE Pair expand(VU raw) {
    const float16x8_t x = bits<float16x8_t>(raw);
    return {bits<VF>(vcvt_f32_f16(vget_low_f16(x))), bits<VF>(vcvt_high_f32_f16(x))};
  }
  static int element_of_slot(int slot) { return slot; }
#else
  // Exponent and mantissa moved into place are the value times 2^-112, subnormals included; an
  // exponent of all ones (inf, NaN) has to be completed.
  DIRECTKV_INLINE VF widen(VU half) {
    const VU magnitude = (half & 0x7fffu) << 13;
    const VU sign = (half & 0x8000u) << 16;
    const VF scaled = bits<VF>(magnitude) * 0x1p112f;
    const VU special = bits<VU>(scaled) | 0x7f800000u;
    return bits<VF>((bits<VI>(magnitude) >= 0x0f800000 ? special : bits<VU>(scaled)) | sign);
  }
  DIRECTKV_INLINE Pair expand(VU raw) { return {widen(raw & 0xffffu), widen(raw >> 16)}; }
  static int element_of_slot(int slot) { return Format<DType::kBF16>::element_of_slot(slot); }
#endif
  DIRECTKV_INLINE Pair load(const char* p) { return expand(load_as<VU>(p)); }
  DIRECTKV_INLINE Pair load_tail(const char* p, int n) { return expand(load_tail16(p, n)); }
};

template <>
struct Format<DType::kF32> {
  static constexpr int kBytes = 4;
  DIRECTKV_INLINE Pair load(const char* p) { return {load_as<VF>(p), load_as<VF>(p + sizeof(VF))}; }
  DIRECTKV_INLINE Pair load_tail(const char* p, int n) {
    float raw[kUnit] = {};
    __builtin_memcpy(raw, p, sizeof(float) * n);
    return {load_as<VF>(raw), load_as<VF>(raw + kLanes)};
  }
  static int element_of_slot(int slot) { return slot; }
};

}  // namespace
}  // namespace directkv::cpu

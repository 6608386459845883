// The vector type of one instruction set: compiler vector extensions, which GCC and Clang lower to
// the -m flags of the translation unit, and plain scalars under DIRECTKV_NO_SIMD.
//
// Everything here has internal linkage, see row_block.h.
#pragma once

#include <cstdint>

#if !defined(DIRECTKV_NO_SIMD) && (defined(__x86_64__) || defined(__i386__))
#include <immintrin.h>
#elif !defined(DIRECTKV_NO_SIMD) && defined(__aarch64__)
#include <arm_neon.h>
#endif

// Lanes of a float32 vector, and how many accumulators a kernel keeps in registers: of 16 or 32,
// what is left holds keys and queries.
#if defined(DIRECTKV_NO_SIMD)
#define DIRECTKV_LANES 1
#define DIRECTKV_ACCUMULATORS 8
#elif defined(__AVX512F__)
#define DIRECTKV_LANES 16
#define DIRECTKV_ACCUMULATORS 16
#elif defined(__AVX2__)
#define DIRECTKV_LANES 8
#define DIRECTKV_ACCUMULATORS 8
#elif defined(__aarch64__)
#define DIRECTKV_LANES 4
#define DIRECTKV_ACCUMULATORS 16
#else
#define DIRECTKV_LANES 4
#define DIRECTKV_ACCUMULATORS 8
#endif

#define DIRECTKV_INLINE static inline __attribute__((always_inline))

namespace directkv::cpu {
namespace {

constexpr int kLanes = DIRECTKV_LANES;
constexpr int kAccumulators = DIRECTKV_ACCUMULATORS;

#if DIRECTKV_LANES == 1
using VF = float;
using VI = int32_t;
using VU = uint32_t;
#else
typedef float VF __attribute__((vector_size(4 * DIRECTKV_LANES)));
typedef int32_t VI __attribute__((vector_size(4 * DIRECTKV_LANES)));
typedef uint32_t VU __attribute__((vector_size(4 * DIRECTKV_LANES)));
#endif

DIRECTKV_INLINE VF splat(float x) { return x - VF{}; }
DIRECTKV_INLINE VU splat_bits(uint32_t x) { return x - VU{}; }

template <typename To, typename From>
DIRECTKV_INLINE To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same width");
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

template <typename V>
DIRECTKV_INLINE V load_as(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

DIRECTKV_INLINE VF load(const float* p) { return load_as<VF>(p); }
DIRECTKV_INLINE void store(float* p, VF v) { __builtin_memcpy(p, &v, sizeof(v)); }

// One instruction where the machine has it: the build passes -ffp-contract=fast.
DIRECTKV_INLINE VF fma(VF a, VF b, VF c) { return a * b + c; }

// Drops a NaN in `a`; it comes back through exp(NaN - m).
DIRECTKV_INLINE VF max_skip_nan(VF a, VF b) { return a > b ? a : b; }

#if DIRECTKV_LANES > 1
#if defined(__clang__)
#define DIRECTKV_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DIRECTKV_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif
#endif

// Lane i of the result is the sum of all lanes of v[i]: a transpose whose steps add. Each step
// makes one vector of two, so 16 sums cost 15 additions and 30 shuffles, a quarter of 16 single
// sums.
#if DIRECTKV_LANES == 1
DIRECTKV_INLINE VF reduce_lanes(const VF* v) { return v[0]; }
#elif DIRECTKV_LANES == 4
DIRECTKV_INLINE VF interleave_add(VF a, VF b) {
  return DIRECTKV_SHUFFLE(a, b, 0, 4, 1, 5) + DIRECTKV_SHUFFLE(a, b, 2, 6, 3, 7);
}
DIRECTKV_INLINE VF reduce_lanes(const VF* v) {
  // v0 v1 v0 v1 with v2 v3 v2 v3, every lane now half a sum.
  const VF a = interleave_add(v[0], v[1]), b = interleave_add(v[2], v[3]);
  return DIRECTKV_SHUFFLE(a, b, 0, 1, 4, 5) + DIRECTKV_SHUFFLE(a, b, 2, 3, 6, 7);
}
#elif DIRECTKV_LANES == 8
DIRECTKV_INLINE VF interleave_add(VF a, VF b) {
  return DIRECTKV_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
         DIRECTKV_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
}
DIRECTKV_INLINE VF quarter_sums(const VF* v) {  // per 128 bits: the partial sums of v[0..3]
  const VF a = interleave_add(v[0], v[1]), b = interleave_add(v[2], v[3]);
  return DIRECTKV_SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
         DIRECTKV_SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
DIRECTKV_INLINE VF reduce_lanes(const VF* v) {
  const VF a = quarter_sums(v), b = quarter_sums(v + 4);
  return DIRECTKV_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         DIRECTKV_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
DIRECTKV_INLINE VF interleave_add(VF a, VF b) {
  return DIRECTKV_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         DIRECTKV_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
}
DIRECTKV_INLINE VF quarter_sums(const VF* v) {  // per 128 bits: the partial sums of v[0..3]
  const VF a = interleave_add(v[0], v[1]), b = interleave_add(v[2], v[3]);
  return DIRECTKV_SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         DIRECTKV_SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
// 128-bit parts A0 A1 A2 A3 and B0 B1 B2 B3 to A01 A23 B01 B23.
DIRECTKV_INLINE VF add_parts(VF a, VF b) {
  return DIRECTKV_SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         DIRECTKV_SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
DIRECTKV_INLINE VF reduce_lanes(const VF* v) {
  return add_parts(add_parts(quarter_sums(v), quarter_sums(v + 4)),
                   add_parts(quarter_sums(v + 8), quarter_sums(v + 12)));
}
#endif

}  // namespace
}  // namespace directkv::cpu

// Tensor core operations on 16-bit elements with float32 sums: m16n8k16, and what feeds it.
//
// Fragments, in lane l of a warp, with row g = l / 4 and pair q = l % 4:
//   A 16x16  a[0] (g, 2q) a[1] (g+8, 2q) a[2] (g, 2q+8) a[3] (g+8, 2q+8), two elements each
//   B 16x8   b[0] (2q, g) b[1] (2q+8, g), two elements down the column each
//   C 16x8   c[0..1] (g, 2q) c[2..3] (g+8, 2q)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

#include "../params.h"
#include "device.cuh"

namespace directkv::cuda {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// Two floats as one register of 16-bit elements, `low` first in memory order.
template <DType kDType>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (kDType == DType::kBF16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    std::memcpy(&bits, &pair, 4);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    std::memcpy(&bits, &pair, 4);
  }
  return bits;
}

// Whether either element is infinite or NaN: an exponent of all ones.
template <DType kDType>
__device__ __forceinline__ bool any_nonfinite(uint32_t pair) {
  constexpr uint32_t kExponent = kDType == DType::kBF16 ? 0x7f80u : 0x7c00u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

#if !defined(DIRECTKV_EMULATE_CUDA)

// Four 8x8 matrices; lane l names row l % 8 (16 bytes) of matrix l / 8.
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], const unsigned char* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// c += a b
template <DType kDType>
__device__ __forceinline__ void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (kDType == DType::kBF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// 2^x, to 2 units in the last place; 0 below 2^-126.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, to 1 unit in the last place.
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The larger; NaN if either is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

#else

// c += a b, every lane its own elements from the fragments of all.
template <DType kDType>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  using E = std::conditional_t<kDType == DType::kBF16, __nv_bfloat16, __half>;
  struct Fragments {
    E a[4][2], b[2][2];
  } own;
  std::memcpy(own.a, a, sizeof(own.a));
  std::memcpy(own.b[0], &b0, 4);
  std::memcpy(own.b[1], &b1, 4);
  const void* const* all = emulation::exchange(&own);
  const auto at = [&](int lane) { return static_cast<const Fragments*>(all[lane]); };
  const int lane = emulation::lane();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const int pair = k % 8 / 2;
      const E x = at(row % 8 * 4 + pair)->a[row / 8 + k / 8 * 2][k % 2];
      const E y = at(column * 4 + pair)->b[k / 8][k % 2];
      c[e] += static_cast<float>(x) * static_cast<float>(y);
    }
  }
  emulation::sync_warp();
}

#endif

}  // namespace directkv::cuda

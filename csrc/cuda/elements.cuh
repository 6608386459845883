// The cache dtypes as C++ types: float32 in, float32 out, wherever they are computed with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "../params.h"
#include "device.cuh"

namespace directkv::cuda {

template <DType kDType>
struct Element;

template <>
struct Element<DType::kF32> {
  using type = float;
  static __device__ __forceinline__ float to_float(float x) { return x; }
  static __device__ __forceinline__ float from_float(float x) { return x; }
};

template <>
struct Element<DType::kBF16> {
  using type = __nv_bfloat16;
  static __device__ __forceinline__ float to_float(type x) { return __bfloat162float(x); }
  static __device__ __forceinline__ type from_float(float x) { return __float2bfloat16_rn(x); }
};

template <>
struct Element<DType::kF16> {
  using type = __half;
  static __device__ __forceinline__ float to_float(type x) { return __half2float(x); }
  static __device__ __forceinline__ type from_float(float x) { return __float2half_rn(x); }
};

// kCount consecutive elements as floats; one load of kCount * sizeof(element) bytes (4, 8 or 16),
// to whose size `from` is aligned.
template <DType kDType, int kCount>
__device__ __forceinline__ void load_floats(const unsigned char* from, float (&to)[kCount]) {
  using E = typename Element<kDType>::type;
  struct alignas(kCount * sizeof(E)) Vector {
    E element[kCount];
  };
  const Vector v = *reinterpret_cast<const Vector*>(from);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = Element<kDType>::to_float(v.element[i]);
}

}  // namespace directkv::cuda

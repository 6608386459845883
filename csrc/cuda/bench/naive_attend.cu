// The naive zero-copy attention to compare with. Split along the cache (flash-decoding) and with as
// many loads in flight as the plain read, so what it lacks is only what the product adds: one read
// for all query heads of a group, and runs longer than one head's row.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "kernels.h"

namespace directkv::bench {
namespace {

constexpr int kThreads = 128;
constexpr int kUnroll = 4;  // tokens in flight per set of lanes: 8 loads of 16 bytes per lane,
                            // for which the 4 of the launch bounds leaves registers

__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ void from_float(float x, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(x);
}
__device__ __forceinline__ void from_float(float x, __half* to) { *to = __float2half_rn(x); }

template <typename E>
__device__ __forceinline__ void unpack(uint4 packed, float (&to)[8]) {
  const E* elements = reinterpret_cast<const E*>(&packed);
#pragma unroll
  for (int i = 0; i < 8; ++i) to[i] = to_float(elements[i]);
}

// exp(from - to) for to >= from, with -inf - -inf an empty side that adds nothing.
__device__ __forceinline__ float rescale(float from, float to) {
  return from == -INFINITY ? 0.0f : __expf(from - to);
}

// One CTA per (split, query head, row). kLanes neighbouring lanes hold one token's row of a head, 8
// elements each (lanes beyond H/8 idle); a set of lanes takes every kSets-th token of the split.
template <typename E, int kLanes>
__global__ void __launch_bounds__(kThreads, 4)
    naive_attend_kernel(const __grid_constant__ NaiveAttendParams p) {
  constexpr int kSets = kThreads / kLanes;
  __shared__ float set_m[kSets], set_l[kSets];
  __shared__ float set_o[kSets][kLanes * 8];
  const int set = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int split = blockIdx.x, n = blockIdx.y, b = blockIdx.z;
  const bool active = lane * 8 < p.head_dim;
  const int64_t length = p.lengths[b];
  const int64_t begin = length * split / p.splits, end = length * (split + 1) / p.splits;
  const int64_t token_stride = int64_t{p.kv_heads} * p.head_dim;  // elements
  const int64_t head = (b * p.slots * p.kv_heads + n / (p.query_heads / p.kv_heads)) * p.head_dim;
  const E* keys = static_cast<const E*>(p.key_cache) + head + lane * 8;
  const E* values = static_cast<const E*>(p.value_cache) + head + lane * 8;
  const int64_t query = int64_t{b} * p.query_heads + n;

  float q[8] = {}, o[8] = {}, m = -INFINITY, l = 0.0f;
  if (active) {
    unpack<E>(*reinterpret_cast<const uint4*>(static_cast<const E*>(p.query) + query * p.head_dim +
                                              lane * 8),
              q);
  }
  for (int64_t first = begin; first < end; first += kUnroll * kSets) {
    uint4 k[kUnroll], v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t token = first + u * kSets + set;
      const bool load = active && token < end;
      k[u] = load ? __ldcs(reinterpret_cast<const uint4*>(keys + token * token_stride)) : uint4{};
      v[u] = load ? __ldcs(reinterpret_cast<const uint4*>(values + token * token_stride)) : uint4{};
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float element[8], logit = 0.0f;
      unpack<E>(k[u], element);
#pragma unroll
      for (int i = 0; i < 8; ++i) logit = fmaf(q[i], element[i], logit);
#pragma unroll
      for (int offset = kLanes / 2; offset > 0; offset /= 2)
        logit += __shfl_xor_sync(0xffffffffu, logit, offset);
      if (first + u * kSets + set >= end) continue;  // the same for all lanes of the set
      logit *= p.scale;
      const float next = fmaxf(m, logit), correction = rescale(m, next);
      const float weight = __expf(logit - next);
      unpack<E>(v[u], element);
#pragma unroll
      for (int i = 0; i < 8; ++i) o[i] = fmaf(weight, element[i], o[i] * correction);
      l = l * correction + weight;
      m = next;
    }
  }

  if (lane == 0) {
    set_m[set] = m;
    set_l[set] = l;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) set_o[set][lane * 8 + i] = o[i];
  __syncthreads();
  float top = -INFINITY;
  for (int s = 0; s < kSets; ++s) top = fmaxf(top, set_m[s]);
  float* partial = p.workspace + (query * p.splits + split) * (p.head_dim + 2);
  for (int h = threadIdx.x; h < p.head_dim + 2; h += kThreads) {
    float sum = h == p.head_dim ? top : 0.0f;
    for (int s = 0; s < kSets && h != p.head_dim; ++s)
      sum += rescale(set_m[s], top) * (h < p.head_dim ? set_o[s][h] : set_l[s]);
    partial[h] = sum;  // o, then m, then l
  }
}

// One CTA per query head and row.
template <typename E>
__global__ void __launch_bounds__(kThreads)
    naive_merge_kernel(const __grid_constant__ NaiveAttendParams p) {
  const int64_t query = blockIdx.x;
  const float* partials = p.workspace + query * p.splits * (p.head_dim + 2);
  float top = -INFINITY, l = 0.0f;
  for (int s = 0; s < p.splits; ++s) top = fmaxf(top, partials[s * (p.head_dim + 2) + p.head_dim]);
  for (int s = 0; s < p.splits; ++s) {
    const float* partial = partials + s * (p.head_dim + 2);
    l += rescale(partial[p.head_dim], top) * partial[p.head_dim + 1];
  }
  for (int h = threadIdx.x; h < p.head_dim; h += kThreads) {
    float sum = 0.0f;
    for (int s = 0; s < p.splits; ++s) {
      const float* partial = partials + s * (p.head_dim + 2);
      sum += rescale(partial[p.head_dim], top) * partial[h];
    }
    from_float(l == 0.0f ? 0.0f : sum / l, static_cast<E*>(p.out) + query * p.head_dim + h);
  }
}

template <typename E>
cudaError_t launch(const NaiveAttendParams& p, cudaStream_t stream) {
  const dim3 grid(p.splits, p.query_heads, p.batch);
  if (p.head_dim <= 64) {
    naive_attend_kernel<E, 8><<<grid, kThreads, 0, stream>>>(p);
  } else if (p.head_dim <= 128) {
    naive_attend_kernel<E, 16><<<grid, kThreads, 0, stream>>>(p);
  } else {
    naive_attend_kernel<E, 32><<<grid, kThreads, 0, stream>>>(p);
  }
  if (auto status = cudaGetLastError(); status != cudaSuccess) return status;
  naive_merge_kernel<E><<<p.batch * p.query_heads, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t naive_attend(const NaiveAttendParams& params, cudaStream_t stream) {
  return params.bf16 ? launch<__nv_bfloat16>(params, stream) : launch<__half>(params, stream);
}

}  // namespace directkv::bench

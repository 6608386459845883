// The partial states in the workspace, and the kernel that merges the splits of every query.
#pragma once

#include "../attend_plan.h"
#include "../softmax_state.h"
#include "elements.cuh"

namespace directkv::cuda {

// o [splits, B, T, N, H], then m and l [splits, B, T, N], all float32.
struct PartialStates {
  float* o;
  float* m;
  float* l;
  int64_t queries;  // B * T * N: slots of one split

  __host__ __device__ PartialStates(const AttendParams& p, int splits)
      : o(static_cast<float*>(p.workspace)),
        queries(int64_t{p.cache.batch} * p.query_tokens * p.query_heads) {
    m = o + splits * queries * p.cache.layout.head_dim;
    l = m + splits * queries;
  }
};

constexpr int kMergeThreads = 128;

// One CTA per query (b, t, n). The threads stand in sets of H/4, one thread per 4 columns; a set
// takes every sets-th split.
//
// A split that saw nothing has m = -inf and wrote no o. A row that cannot be served has m = NaN.
template <DType kDType>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams p, int splits) {
  __shared__ float warp_max[kMergeThreads / 32];
  __shared__ __align__(16) float sums[4 * kMergeThreads];  // one float4 per thread
  __shared__ float weights[kMergeThreads];                 // sum of l of each set

  using E = typename Element<kDType>::type;
  const int thread = static_cast<int>(threadIdx.x), head_dim = p.cache.layout.head_dim;
  const int64_t query = blockIdx.x;
  const int64_t row_token = query / p.query_heads;
  const int b = static_cast<int>(row_token / p.query_tokens);
  const int t = static_cast<int>(row_token % p.query_tokens);
  const int seq = p.seq_lengths[b];
  E* out = static_cast<E*>(p.out) + query * head_dim;

  if (seq >= 0 && seq <= p.query_tokens && t >= seq) {  // not a valid query: nothing was computed
    for (int h = thread; h < head_dim; h += kMergeThreads)
      out[h] = Element<kDType>::from_float(0.0f);
    if (thread == 0) p.lse[query] = -INFINITY;
    return;
  }

  const PartialStates states(p, splits);
  float m = -INFINITY;
  for (int s = thread; s < splits; s += kMergeThreads)
    m = max_keep_nan(m, states.m[s * states.queries + query]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    m = max_keep_nan(m, __shfl_xor_sync(kFullWarp, m, offset));
  if (thread % 32 == 0) warp_max[thread / 32] = m;
  __syncthreads();
  m = warp_max[0];
#pragma unroll
  for (int w = 1; w < kMergeThreads / 32; ++w) m = max_keep_nan(m, warp_max[w]);

  if (m != m) {
    for (int h = thread; h < head_dim; h += kMergeThreads)
      out[h] = Element<kDType>::from_float(NAN);
    if (thread == 0) p.lse[query] = NAN;
    return;
  }

  const int quads = head_dim / 4, sets = kMergeThreads / quads;
  const int set = thread / quads, quad = thread % quads;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  float l = 0.0f;
  if (set < sets) {
    for (int s = set; s < splits; s += sets) {
      const int64_t slot = s * states.queries + query;
      const float from = states.m[slot];
      if (from == -INFINITY) continue;
      const float weight = rescale(from, m);
      const float4 o = *reinterpret_cast<const float4*>(states.o + slot * head_dim + quad * 4);
      l = fmaf(weight, states.l[slot], l);
      sum.x = fmaf(weight, o.x, sum.x);
      sum.y = fmaf(weight, o.y, sum.y);
      sum.z = fmaf(weight, o.z, sum.z);
      sum.w = fmaf(weight, o.w, sum.w);
    }
    *reinterpret_cast<float4*>(sums + 4 * thread) = sum;
    if (quad == 0) weights[set] = l;
  }
  __syncthreads();
  if (set == 0) {
    for (int s = 1; s < sets; ++s) {
      const float4 o = *reinterpret_cast<const float4*>(sums + 4 * (s * quads + quad));
      sum.x += o.x;
      sum.y += o.y;
      sum.z += o.z;
      sum.w += o.w;
      l += weights[s];
    }
    const float inverse = inverse_sum({m, l});
    E* to = out + quad * 4;
    to[0] = Element<kDType>::from_float(sum.x * inverse);
    to[1] = Element<kDType>::from_float(sum.y * inverse);
    to[2] = Element<kDType>::from_float(sum.z * inverse);
    to[3] = Element<kDType>::from_float(sum.w * inverse);
    if (quad == 0) p.lse[query] = logsumexp({m, l});
  }
}

}  // namespace directkv::cuda

// The kernel that merges the partial states of units cut between CTAs, and answers for queries that
// have no unit: those that are not valid, see nothing, or stand in a row that cannot be served.
#pragma once

#include "segment_output.cuh"

namespace directkv::cuda {

constexpr int kMergeThreads = 128;

// One CTA per query (b, t, n). It finds out what there is to merge while the attend kernel runs, and
// waits for it before it touches a result. The threads stand in sets of H/4, one thread per 4 columns;
// a set takes every sets-th partial state.
template <DType kDType>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ AttendGrid grid) {
  __shared__ float warp_max[kMergeThreads / 32];
  __shared__ __align__(16) float sums[4 * kMergeThreads];  // one float4 per thread
  __shared__ float weights[kMergeThreads];                 // sum of l of each set

  using E = typename Element<kDType>::type;
  const CacheView& cache = p.cache;
  const int thread = static_cast<int>(threadIdx.x), head_dim = cache.layout.head_dim;
  const int64_t query = blockIdx.x;
  const int64_t row_token = query / p.query_heads;
  const int b = static_cast<int>(row_token / p.query_tokens);
  const int t = static_cast<int>(row_token % p.query_tokens);
  E* const out = static_cast<E*>(p.out) + query * head_dim;
  const auto answer = [&](float value, float lse) {
    wait_for_earlier_kernels();
    for (int h = thread; h < head_dim; h += kMergeThreads)
      out[h] = Element<kDType>::from_float(value);
    if (thread == 0) p.lse[query] = lse;
  };

  let_next_kernel_start();
  const int seq = p.seq_lengths[b];
  const bool seq_ok = seq >= 0 && seq <= p.query_tokens;
  if (seq_ok && t >= seq) return answer(0.0f, -INFINITY);  // not a valid query

  // One page id out of range among those that any query of the row needs makes all of them NaN.
  const int64_t length = cache.lengths[b];
  bool bad =
      !seq_ok || length < 0 || length > capacity(cache) || !layer_in_range(cache, *cache.layer);
  if (!bad) {
    const int page_size = cache.layout.page_size;
    const int64_t first = first_seen(length, 0, p.window_left);
    const PageRange pages = {static_cast<int>(first / page_size),
                             static_cast<int>((length + page_size - 1) / page_size)};
    bad = first < length &&
          any_bad_page(cache.page_table + int64_t{b} * cache.max_pages, pages, cache.num_pages);
  }
  if (__syncthreads_or(bad)) return answer(NAN, NAN);

  const int group = p.query_heads / cache.layout.kv_heads;
  const int n = static_cast<int>(query % p.query_heads), k = n / group;
  const int block = t / grid.tokens_per_block;
  const RowWork row(p, b);
  const Unit unit(p, grid, row, block);
  if (unit.tiles == 0) return answer(0.0f, -INFINITY);

  // Where the unit begins in the work list.
  int total = 0, begin = 0;
  for (int base = 0; base < cache.batch; base += 32) {
    const RowGroup group(p, grid, base, total);
    total = group.total();
    if (b >= base && b < base + 32) {
      const int per_head = __shfl_sync(kFullWarp, group.per_head, b - base);
      begin = __shfl_sync(kFullWarp, group.end, b - base) - (cache.layout.kv_heads - k) * per_head;
    }
  }
  for (int i = 0; i < block; ++i) begin += Unit(p, grid, row, i).tiles;
  const WorkSplit split(grid, total);
  const int first_cta = split.cta_of(begin), last_cta = split.cta_of(begin + unit.tiles - 1);
  wait_for_earlier_kernels();
  if (first_cta == last_cta) return;  // the unit was finished there

  const PartialStates states(p, grid);
  const int r = (t - block * grid.tokens_per_block) * group + n % group;
  const auto state_row = [&](int cta) {
    return states.row(PartialStates::slot(cta, cta == first_cta), r);
  };
  float m = -INFINITY;
  for (int cta = first_cta + thread; cta <= last_cta; cta += kMergeThreads)
    m = max_keep_nan(m, states.m[state_row(cta)]);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    m = max_keep_nan(m, __shfl_xor_sync(kFullWarp, m, offset));
  if (thread % 32 == 0) warp_max[thread / 32] = m;
  __syncthreads();
  m = warp_max[0];
#pragma unroll
  for (int w = 1; w < kMergeThreads / 32; ++w) m = max_keep_nan(m, warp_max[w]);

  const int quads = head_dim / 4, sets = kMergeThreads / quads;
  const int set = thread / quads, quad = thread % quads;
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
  float l = 0.0f;
  if (set < sets) {
#pragma unroll 4
    for (int cta = first_cta + set; cta <= last_cta; cta += sets) {
      const int64_t at = state_row(cta);
      const float weight = rescale(states.m[at], m);
      const float4 o = *reinterpret_cast<const float4*>(states.o + at * head_dim + quad * 4);
      l = fmaf(weight, states.l[at], l);
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
    E* const to = out + quad * 4;
    to[0] = Element<kDType>::from_float(sum.x * inverse);
    to[1] = Element<kDType>::from_float(sum.y * inverse);
    to[2] = Element<kDType>::from_float(sum.z * inverse);
    to[3] = Element<kDType>::from_float(sum.w * inverse);
    if (quad == 0) p.lse[query] = logsumexp({m, l});
  }
}

}  // namespace directkv::cuda

// The kernel that merges the partial states of units cut between CTAs, and answers for queries that
// have no unit: those that are not valid, see nothing, or stand in a row that cannot be served.
#pragma once

#include "segment_output.cuh"

namespace directkv::cuda {

constexpr int kMergeThreads = 128;

// The same value everywhere in a query's output.
template <DType kDType>
__device__ __forceinline__ void answer(const AttendParams& p, int64_t query, float value,
                                       float lse) {
  using E = typename Element<kDType>::type;
  const int head_dim = p.cache.layout.head_dim, thread = static_cast<int>(threadIdx.x);
  for (int h = thread; h < head_dim; h += kMergeThreads)
    static_cast<E*>(p.out)[query * head_dim + h] = Element<kDType>::from_float(value);
  if (thread == 0) p.lse[query] = lse;
}

// A state and its sums over the values of 4 columns.
struct MergedState {
  SoftmaxState own = empty_state();
  float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};

  // Carries it over to the maximum `m`, at least its own.
  __device__ __forceinline__ void carry_to(float m) {
    const float keep = rescale(own.m, m);
    own = {m, own.l * keep};
    sum.x *= keep, sum.y *= keep, sum.z *= keep, sum.w *= keep;
  }
  // Adds another whose maximum is at most its own.
  __device__ __forceinline__ void add(SoftmaxState state, const float4& o) {
    const float weight = rescale(state.m, own.m);
    own.l += weight * state.l;
    sum.x += weight * o.x;
    sum.y += weight * o.y;
    sum.z += weight * o.z;
    sum.w += weight * o.w;
  }
};

// Row r of a unit, from the partial states that CTAs [first_cta, last_cta] left of it. The threads
// stand in sets of H/4, one thread per 4 columns; a set merges every sets-th state, kAtOnce of them
// loaded together, and then the first set merges what all sets have.
template <DType kDType>
__device__ __forceinline__ void merge_row(const AttendParams& p, const AttendGrid& grid,
                                          int64_t query, int r, int first_cta, int last_cta) {
  constexpr int kAtOnce = 8;
  __shared__ __align__(16) float sums[4 * kMergeThreads];  // one float4 per thread
  __shared__ SoftmaxState set_states[kMergeThreads];

  using E = typename Element<kDType>::type;
  const int thread = static_cast<int>(threadIdx.x), head_dim = p.cache.layout.head_dim;
  const int quads = head_dim / 4, sets = kMergeThreads / quads;
  const int set = thread / quads, quad = thread % quads;
  const PartialStates states(p, grid);
  MergedState merged;
  for (int cta = first_cta + set; set < sets && cta <= last_cta; cta += kAtOnce * sets) {
    SoftmaxState state[kAtOnce];
    float4 o[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int from = cta + i * sets;
      state[i] = empty_state();
      o[i] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (from > last_cta) continue;
      const int64_t at = states.row(PartialStates::slot(from, from == first_cta), r);
      state[i] = {states.m[at], states.l[at]};
      o[i] = *reinterpret_cast<const float4*>(states.o + at * head_dim + quad * 4);
    }
    float m = merged.own.m;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) m = max_keep_nan(m, state[i].m);
    merged.carry_to(m);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) merged.add(state[i], o[i]);
  }
  if (set < sets) {
    *reinterpret_cast<float4*>(sums + 4 * thread) = merged.sum;
    if (quad == 0) set_states[set] = merged.own;
  }
  __syncthreads();
  if (set == 0) {
    for (int s = 1; s < sets; ++s) {
      merged.carry_to(max_keep_nan(merged.own.m, set_states[s].m));
      merged.add(set_states[s], *reinterpret_cast<const float4*>(sums + 4 * (s * quads + quad)));
    }
    const float inverse = inverse_sum(merged.own);
    E* const to = static_cast<E*>(p.out) + query * head_dim + quad * 4;
    to[0] = Element<kDType>::from_float(merged.sum.x * inverse);
    to[1] = Element<kDType>::from_float(merged.sum.y * inverse);
    to[2] = Element<kDType>::from_float(merged.sum.z * inverse);
    to[3] = Element<kDType>::from_float(merged.sum.w * inverse);
    if (quad == 0) p.lse[query] = logsumexp(merged.own);
  }
  __syncthreads();  // before the next row
}

// CTAs that share the rows of a unit: one for each row where there is one row block, fewer where
// there are many, because each finds its place in the work list by counting the work of every
// block.
inline __host__ __device__ int merge_ctas_per_unit(const AttendGrid& grid) {
  const int each = grid.row_blocks < grid.rows_per_block ? grid.row_blocks : grid.rows_per_block;
  return (grid.rows_per_block + each - 1) / each;
}

// A CTA finds out what there is to merge while the attend kernel runs, and waits for it before it
// touches a result.
template <DType kDType>
__global__ void __launch_bounds__(kMergeThreads)
    merge_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ AttendGrid grid) {
  const CacheView& cache = p.cache;
  const int kv_heads = cache.layout.kv_heads, group = p.query_heads / kv_heads;
  const int parts = merge_ctas_per_unit(grid);
  int64_t rest = blockIdx.x;
  const int part = static_cast<int>(rest % parts);
  rest /= parts;
  const int block = static_cast<int>(rest % grid.row_blocks);
  rest /= grid.row_blocks;
  const int k = static_cast<int>(rest % kv_heads), b = static_cast<int>(rest / kv_heads);
  const int first_token = block * grid.tokens_per_block;

  let_next_kernel_start();
  // One page id out of range among those that any query of the row needs makes all of them NaN.
  const int64_t length = cache.lengths[b];
  const int seq = p.seq_lengths[b];
  const bool seq_ok = seq >= 0 && seq <= p.query_tokens;
  bool bad =
      !seq_ok || length < 0 || length > capacity(cache) || !layer_in_range(cache, *cache.layer);
  if (!bad && first_token < seq) {
    const int page_size = cache.layout.page_size;
    const int first = first_seen(static_cast<int>(length), 0, p.window_left);
    const PageRange pages = {first / page_size,
                             static_cast<int>((length + page_size - 1) / page_size)};
    bad = first < length &&
          any_bad_page(cache.page_table + int64_t{b} * cache.max_pages, pages, cache.num_pages);
  }
  bad = __syncthreads_or(bad);

  const RowWork row(p, b);
  const Unit unit(p, grid, row, block);
  int first_cta = 0, last_cta = 0;  // that have tiles of the unit
  if (!bad && unit.tiles > 0) {
    int total = 0, begin = 0;
    for (int base = 0; base < cache.batch; base += 32) {
      const RowGroup rows(p, grid, base, total);
      total = rows.total();
      if (b >= base && b < base + 32) {
        const int per_head = __shfl_sync(kFullWarp, rows.per_head, b - base);
        begin = __shfl_sync(kFullWarp, rows.end, b - base) - (kv_heads - k) * per_head;
      }
    }
    for (int i = 0; i < block; ++i) begin += Unit(p, grid, row, i).work();
    begin += unit.cost();  // to its first tile
    const WorkSplit split(grid, total);
    first_cta = split.cta_of(begin);
    last_cta = split.cta_of(begin + unit.tiles - 1);
  }

  wait_for_earlier_kernels();
  const int rows = min(grid.tokens_per_block, p.query_tokens - first_token) * group;
  for (int r = part; r < rows; r += parts) {
    const int t = first_token + r / group;
    const int64_t query = (int64_t{b} * p.query_tokens + t) * p.query_heads + k * group + r % group;
    if (seq_ok && t >= seq) {  // not a valid query
      answer<kDType>(p, query, 0.0f, -INFINITY);
    } else if (bad) {
      answer<kDType>(p, query, NAN, NAN);
    } else if (unit.tiles == 0) {
      answer<kDType>(p, query, 0.0f, -INFINITY);
    } else if (first_cta < last_cta) {
      merge_row<kDType>(p, grid, query, r, first_cta, last_cta);
    }  // else its only CTA has finished the unit
  }
}

}  // namespace directkv::cuda

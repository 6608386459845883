// The query rows of a segment, and which tokens they see.
#pragma once

#include "work_list.cuh"

namespace directkv::cuda {

// How products become logits, and which of them count.
struct LogitOptions {
  float scale, soft_cap;
  int window_left;

  __device__ __forceinline__ explicit LogitOptions(const AttendParams& p)
      : scale(p.scale), soft_cap(p.soft_cap), window_left(p.window_left) {}

  // What the query with new token t sees: tokens at `relative` (their position minus the length)
  // from first_seen(t) to t.
  __device__ __forceinline__ int first_seen(int t) const {
    return window_left < 0 ? -kMaxLength : max(-kMaxLength, t - window_left);
  }
  __device__ __forceinline__ bool seen(int t, int relative) const {
    return relative <= t && relative >= first_seen(t);
  }
};

// Waits until the projection that was launched just before has written queries, keys and values of
// row b, KV head k. All lanes of a warp.
__device__ __forceinline__ void wait_for_projection(const AttendParams& p, int b, int k) {
  const int kv_heads = p.cache.layout.kv_heads, parts = p.query_heads / kv_heads + 2;
  const int count = p.query_tokens * parts;
  const int32_t* const flags = p.projected + (int64_t{b} * p.query_tokens * kv_heads + k) * parts;
#pragma unroll 1
  for (int base = 0; base < count; base += 32) {
    const int i = min(base + lane_id(), count - 1), t = i / parts;
    wait_for_flag(flags + int64_t{t} * kv_heads * parts + (i - t * parts));
  }
  __syncwarp();
}

// The query rows of a segment.
struct QueryRows {
  int64_t first;  // query of (b, t = 0, first head of k)
  int count, group, heads;
  int token_begin;
  float inverse_group;

  __device__ __forceinline__ QueryRows(const AttendParams& p, const AttendGrid& grid,
                                       const Segment& s)
      : QueryRows(p, grid.inverse_group, s.b, s.k, s.unit.token_begin, s.unit.tokens) {}
  __device__ __forceinline__ QueryRows(const AttendParams& p, float inverse_group_, int b, int k,
                                       int token_begin_, int tokens)
      : group(p.query_heads / p.cache.layout.kv_heads),
        heads(p.query_heads),
        token_begin(token_begin_),
        inverse_group(inverse_group_) {
    count = tokens * group;
    first = int64_t{b} * p.query_tokens * heads + int64_t{k} * group;
  }
  // r / G: exact, r is at most a few hundred.
  __device__ __forceinline__ int in_block(int r) const {
    return static_cast<int>((static_cast<float>(r) + 0.5f) * inverse_group);
  }
  __device__ __forceinline__ int token(int r) const { return token_begin + in_block(r); }
  // Index of row r in [B, T, N].
  __device__ __forceinline__ int64_t query(int r) const {
    const int t = in_block(r);
    return first + int64_t{token_begin + t} * heads + (r - t * group);
  }
};

}  // namespace directkv::cuda

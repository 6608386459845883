// How attention of many new tokens is spread over the GPU, and the workspace that costs. Plain
// arithmetic on shapes, as attend_plan.h.
//
// More query rows than one CTA holds would read every tile once for each block of them, and host
// memory is not cached on the way: each read crosses the link again. So the cached tokens of all
// rows are taken in ranges. While the CTAs of one launch attend to a range in device memory, a few
// of them copy the next one over the link into the other slot of a ring:
//
//   launch     0            1            2                     last
//   attends    new tokens   range 0      range 1        ...    last range
//   copies     range 0      range 1      range 2        ...    -
//
// The softmax states of all query rows wait in device memory from launch to launch. A range is as
// large as L2 can hold beside the states in passing; neither grows with the context, up to
// kMaxChunkLaunches ranges.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "attend_plan.h"

namespace directkv::cuda {

constexpr int64_t kRingSlotBytes = int64_t{16} << 20;
constexpr int kChunkRows = 128;         // query rows of a CTA: two warpgroups of 64
constexpr int kMaxChunkLaunches = 128;  // a CUDA graph of all layers has as many nodes for each
// Two warpgroups attend. Of a third, two warps fetch: registers move between whole warpgroups.
constexpr int kChunkThreads = 3 * 128;
constexpr int kCopyRunBytes = 4096;  // what a warp copies at once; a divisor of all pages

// Tokens of a tile: the scores and the output of 64 rows have to fit into the registers of 128
// threads together.
constexpr int chunk_tile_tokens(int head_dim) { return head_dim <= 128 ? 128 : 64; }

// Head dims in whole spans of 64 elements.
constexpr bool chunk_supports(int itemsize, int head_dim) {
  return itemsize == 2 && (head_dim == 64 || head_dim == 128 || head_dim == 256);
}

// Floats of the state of one CTA's rows: every thread of two warpgroups has H / 2 sums, and maximum
// and sum of weights of two rows.
constexpr int chunk_state_floats(int head_dim) { return (head_dim / 2 + 4) * 2 * 128; }

// CTAs that copy. Loads of 16 bytes, 48 KiB in flight for each CTA: PCIe needs two of them, C2C
// ten (attend_plan.h); twice that, because a warp stores what it has loaded before it goes on.
inline int choose_copy_ctas(bool coherent_link) { return coherent_link ? 20 : 4; }

struct ChunkPlan {
  bool used;             // by shape; the GPU must have warpgroup instructions too
  int tokens_per_block;  // new tokens whose rows one CTA attends for
  int row_blocks;        // ceil(T / tokens_per_block)
  int range_tokens;      // cached tokens of each row in one slot of the ring; whole pages
  int ranges;            // that cover the capacity
  int64_t slot_bytes, state_bytes;
};

inline ChunkPlan make_chunk_plan(int itemsize, int batch, int query_tokens, int query_heads,
                                 int kv_heads, int head_dim, int page_size, int64_t max_pages,
                                 int64_t slot_bytes = kRingSlotBytes) {
  ChunkPlan plan = {};
  const int group = std::max(1, query_heads / kv_heads);
  const int rows = row_limit(itemsize, head_dim, group, true);
  plan.used = chunk_supports(itemsize, head_dim) && group <= kChunkRows &&
              int64_t{query_tokens} * group > rows && batch > 0;
  if (!plan.used) return plan;
  plan.tokens_per_block = kChunkRows / group;
  plan.row_blocks = (query_tokens + plan.tokens_per_block - 1) / plan.tokens_per_block;
  const int64_t page_bytes = int64_t{2} * page_size * kv_heads * head_dim * itemsize;
  const int64_t pages = std::max<int64_t>(1, max_pages);
  int64_t range_pages = std::max<int64_t>(1, slot_bytes / (batch * page_bytes));
  range_pages = std::max(range_pages, (pages + kMaxChunkLaunches - 1) / kMaxChunkLaunches);
  // Whole tiles, where there are several ranges.
  const int tile = chunk_tile_tokens(head_dim), pages_of_tiles = tile / std::gcd(tile, page_size);
  range_pages = (range_pages + pages_of_tiles - 1) / pages_of_tiles * pages_of_tiles;
  range_pages = std::min(range_pages, pages);
  plan.range_tokens = static_cast<int>(range_pages * page_size);
  plan.ranges = static_cast<int>((pages + range_pages - 1) / range_pages);
  plan.slot_bytes = batch * range_pages * page_bytes;
  plan.state_bytes = int64_t{4} * batch * kv_heads * plan.row_blocks * chunk_state_floats(head_dim);
  return plan;
}

// Of an attend call, however it is carried out: for many new tokens over a host cache two slots and
// the states.
inline int64_t workspace_bytes(int itemsize, int batch, int query_tokens, int query_heads,
                               int kv_heads, int head_dim, int page_size, int64_t max_pages,
                               bool host) {
  const ChunkPlan plan = make_chunk_plan(itemsize, batch, query_tokens, query_heads, kv_heads,
                                         head_dim, page_size, max_pages);
  return std::max(attend_workspace_bytes(itemsize, batch, query_tokens, query_heads, kv_heads,
                                         head_dim, max_pages * page_size),
                  plan.used && host ? 2 * plan.slot_bytes + plan.state_bytes : 0);
}

}  // namespace directkv::cuda

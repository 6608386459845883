// How one attend call is spread over the GPU: query rows per CTA, CTAs, and the workspace that
// costs. Plain arithmetic on shapes, so that Python can size the workspace while tracing, on a
// machine without a GPU.
//
// How many CTAs (the round trips of C2C and HBM are assumed). A CTA keeps a ring of about 96 KiB
// full (tile_ring.cuh), and a memory needs bandwidth * round trip in flight:
//
//   PCIe   51 GB/s  * 1.7 us =  87 KB: one CTA's ring covers it. Two CTAs that only fetch reach the
//          peak; arithmetic, and the gap between one stretch of work and the next, ask for more.
//          16 leave the rest of the GPU free (docs/performance.md has the curve).
//   C2C   375 GB/s  * 1.3 us = 490 KB: six rings at least; 64 CTAs, so that a CTA's share (6 GB/s)
//          stays as far below what its arithmetic can take as on PCIe. Not measured.
//   HBM  4.6 TB/s   * 0.8 us = 3.7 MB: all SMs, two CTAs each where registers and shared memory
//          allow a ring of kMinStages, so that one computes while the other waits.
//
// Where arithmetic bounds the kernel (float32 has no tensor cores here; more query rows than one
// CTA holds) all SMs are used whatever the memory, as far as the workspace goes: 118 CTAs of 128
// rows of head dim 128.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../page_layout.h"

namespace directkv::cuda {

constexpr int kPcieCtas = 16;
constexpr int kC2cCtas = 64;
constexpr int kMaxCtas = 296;  // two per SM of a B200
// Two partial states for each CTA: the stretch of work it starts within and the one it ends within.
constexpr int kSlotsPerCta = 2;
constexpr int kMinStages = 3, kMaxStages = 16;  // of a ring
// Beside a projection, in device memory: shorter rings, so that shared memory keeps none of these
// CTAs from starting while the projection runs.
constexpr int kRingBesideProjection = 65 * 1024;
constexpr int64_t kMaxWorkspaceBytes = int64_t{15} << 20;

// Query rows (of the G*T of one KV head) that a CTA has room for.
constexpr int max_rows(int itemsize, int head_dim) {
  return itemsize == 2 ? 128 : head_dim > 128 ? 32 : 64;
}

// Those that it takes. 128 rows of head dim 256 leave room in the workspace for half as many CTAs:
// half the rows are taken where another pass over the tiles costs less (`!wide`: they are in HBM).
constexpr int row_limit(int itemsize, int head_dim, int group, bool wide) {
  const int most = max_rows(itemsize, head_dim);
  return itemsize == 2 && head_dim > 128 && !wide && group <= most / 2 ? most / 2 : most;
}

// Tokens of a tile: keys and values of one KV head in one stage of the ring, 16 or 32 KiB. 16-bit
// tiles are a multiple of the 16 tokens of a matrix instruction.
constexpr int tile_tokens(int itemsize, int head_dim) {
  const int token_bytes = itemsize * head_dim;
  if (itemsize == 2) return token_bytes <= 256 ? 64 : 32;
  return token_bytes <= 256 ? 32 : token_bytes <= 512 ? 16 : 8;
}

// Tokens that lie together in every page: a power of two, at most a tile.
constexpr int box_tokens(int page_size, int tile) {
  int box = tile;
  while (page_size % box != 0) box /= 2;
  return box;
}

// Bytes of the partial state of one query row: o[H], m, l.
constexpr int64_t state_bytes(int head_dim) { return int64_t{4} * (head_dim + 2); }

struct AttendPlan {
  int tokens_per_block;  // new tokens whose rows one CTA attends for together
  int rows_per_block;    // tokens_per_block * G
  int row_blocks;        // ceil(T / tokens_per_block): each re-reads the KV tiles it needs
  int max_ctas;
};

// `wide`: see row_limit().
inline AttendPlan make_attend_plan(int itemsize, int batch, int query_tokens, int query_heads,
                                   int kv_heads, int head_dim, int64_t capacity, bool wide) {
  const int group = std::max(1, query_heads / kv_heads), tokens = std::max(1, query_tokens);
  AttendPlan plan;
  plan.tokens_per_block = std::clamp(row_limit(itemsize, head_dim, group, wide) / group, 1, tokens);
  plan.rows_per_block = plan.tokens_per_block * group;
  plan.row_blocks = (tokens + plan.tokens_per_block - 1) / plan.tokens_per_block;
  const int64_t slot_bytes = plan.rows_per_block * state_bytes(head_dim);
  const int64_t tile = tile_tokens(itemsize, head_dim);
  const int64_t tiles =
      int64_t{batch} * kv_heads * plan.row_blocks * (capacity / tile + query_tokens / tile + 2);
  plan.max_ctas = static_cast<int>(std::max<int64_t>(
      1, std::min({int64_t{kMaxCtas}, tiles, kMaxWorkspaceBytes / (kSlotsPerCta * slot_bytes)})));
  return plan;
}

// Partial states (o[H], m, l) of the rows of every slot, float32; enough for either plan.
inline int64_t attend_workspace_bytes(int itemsize, int batch, int query_tokens, int query_heads,
                                      int kv_heads, int head_dim, int64_t capacity) {
  int64_t bytes = 0;
  for (const bool wide : {false, true}) {
    const AttendPlan plan = make_attend_plan(itemsize, batch, query_tokens, query_heads, kv_heads,
                                             head_dim, capacity, wide);
    bytes =
        std::max(bytes, kSlotsPerCta * plan.max_ctas * plan.rows_per_block * state_bytes(head_dim));
  }
  return bytes;
}

enum class Memory { kHbm, kPcie, kC2c };  // where the pages are, as the GPU reaches them

inline int choose_ctas(const AttendPlan& plan, Memory memory, bool arithmetic_bound, int sm_count,
                       int ctas_per_sm) {
  int ctas = sm_count * ctas_per_sm;
  if (!arithmetic_bound && plan.row_blocks == 1) {
    if (memory == Memory::kPcie) ctas = kPcieCtas;
    if (memory == Memory::kC2c) ctas = kC2cCtas;
  }
  return std::min(plan.max_ctas, ctas);
}

}  // namespace directkv::cuda

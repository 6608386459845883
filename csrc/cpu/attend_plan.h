// The static split of one attend call on the CPU: into how many parts the pages of a row may be
// cut, and the workspace that costs. Plain arithmetic on shapes, so that Python can size the
// workspace while tracing.
#pragma once

#include <algorithm>
#include <cstdint>

namespace directkv::cpu {

struct AttendPlan {
  int rows_per_block;  // query rows (of the G*T of one KV head) that are attended for together
  int row_blocks;      // ceil(G*T / rows_per_block): each re-reads the KV tiles it needs
  int splits;          // parts of the pages of one (row, KV head, row block)
};

// Enough parts for the threads of a large machine.
constexpr int kTargetBlocks = 264;
constexpr int kMaxRowsPerBlock = 64;

inline AttendPlan make_attend_plan(int batch, int query_tokens, int query_heads, int kv_heads,
                                   int max_pages) {
  const int rows = query_tokens * (query_heads / kv_heads);
  AttendPlan plan;
  plan.rows_per_block = std::min(kMaxRowsPerBlock, std::max(1, rows));
  plan.row_blocks = (rows + plan.rows_per_block - 1) / std::max(1, plan.rows_per_block);
  const int64_t independent = int64_t{batch} * kv_heads * std::max(1, plan.row_blocks);
  const int64_t wanted = (kTargetBlocks + independent - 1) / std::max<int64_t>(1, independent);
  plan.splits =
      static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(wanted, std::max(1, max_pages))));
  return plan;
}

// Partial states (m, l, o[H]) of every split, float32.
inline int64_t attend_workspace_bytes(int batch, int query_tokens, int query_heads, int kv_heads,
                                      int head_dim, int max_pages) {
  const AttendPlan plan = make_attend_plan(batch, query_tokens, query_heads, kv_heads, max_pages);
  return int64_t{4} * plan.splits * batch * query_tokens * query_heads * (head_dim + 2);
}

}  // namespace directkv::cpu

// How a projection is spread over the GPU.
#pragma once

#include <algorithm>

namespace directkv::cuda {

// Rows (B * T) of a projection of its own kernel. It reads the weights once, as fast as memory
// gives them; from some tens of rows on a matrix product of cuBLAS should do that too. Not
// measured.
constexpr int kMaxProjectRows = 32;

constexpr int kProjectWarps = 4;     // that multiply; one more fetches
constexpr int kProjectColumns = 64;  // of a warp
constexpr int kMaxProjectCtas = 8;   // a cluster that every part can schedule

// Warps side by side over the columns of a head; the others share D.
constexpr int project_column_warps(int head_dim) {
  return head_dim <= kProjectColumns ? 1 : head_dim <= 2 * kProjectColumns ? 2 : 4;
}
// Stages of 8 KiB of weights, and of x `groups` times 8 rows. The sums of 32 rows need room too, on
// parts with 100 KiB of shared memory.
constexpr int project_stages(int groups) { return groups > 2 ? 4 : 6; }

// Elements of D in a stage: 16 for each of the warps that share them.
constexpr int project_stage_rows(int column_warps) { return 16 * kProjectWarps / column_warps; }

// CTAs for each head: about one on an SM, so that one of the attend kernel fits beside it, and each
// with work. `stages`: of all D.
inline int choose_ctas_per_head(int heads, int stages, int sm_count) {
  return std::clamp(std::min((sm_count + heads / 2) / heads, stages), 1, kMaxProjectCtas);
}

}  // namespace directkv::cuda

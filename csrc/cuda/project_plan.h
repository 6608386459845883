// How a projection is spread over the GPU.
#pragma once

#include <algorithm>

namespace directkv::cuda {

// Rows (B * T) of a projection of its own kernel. It reads the weights once, as fast as memory
// gives them; from some tens of rows on a matrix product of cuBLAS should do that too. Not
// measured.
constexpr int kMaxProjectRows = 32;

constexpr int kMaxProjectCtas = 8;  // a cluster that every part can schedule

// CTAs for each head: as many as the GPU holds at once and have work. `most_shares`: of D, for all
// CTAs together.
inline int choose_ctas_per_head(int heads, int shares_per_cta, int most_shares, int resident) {
  int ctas = 1;
  while (ctas < kMaxProjectCtas && 2 * ctas * heads <= resident &&
         2 * ctas * shares_per_cta <= most_shares)
    ctas *= 2;
  return ctas;
}

}  // namespace directkv::cuda

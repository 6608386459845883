// What one launch of the chunk kernel does (chunk_plan.h), and the tiles of it that a CTA attends
// to.
#pragma once

#include "chunk_plan.h"
#include "units.cuh"

namespace directkv::cuda {

struct ChunkGrid {
  int tokens_per_block, row_blocks;
  int box_tokens;              // tokens one copy to shared memory brings
  int copy_ctas;               // the first CTAs: they copy, the others attend
  int range_begin, range_end;  // cached positions attended to; from the cache where `slot` is null
  int copy_begin, copy_end;    // cached positions copied to `copy_to`
  int slot_row_pages;          // pages of a row in a slot
  const unsigned char* slot;   // [B, slot_row_pages, K, E]; pages of the range
  unsigned char* copy_to;      // the same, of the range to be copied
  float* states;               // of all units; null: one launch does it all
  bool fresh;                  // attends to the new tokens too
  bool first, last;            // of the launches
  float inverse_group;         // 1 / G
};

// Consecutive tokens of a tile; see Tile.
struct ChunkTile {
  int count, position, relative;
  bool fresh;
};

// The tiles of one unit: those of the cached range that its first query sees the end of, then those
// of the new tokens up to its last query.
template <int kTokens>
class ChunkTiles {
 public:
  // `tokens`: valid new tokens of the unit, from `token_begin` on.
  __device__ __forceinline__ ChunkTiles(const AttendParams& p, const ChunkGrid& grid,
                                        const RowWork& row, int token_begin, int tokens)
      : length_(row.length), cached_begin_(0), cached_end_(0), fresh_begin_(0), fresh_end_(0) {
    if (tokens == 0) return;
    const int first = max(first_seen(row.length, token_begin, p.window_left), grid.range_begin);
    const int end = min(row.length, grid.range_end);
    if (first < end) {
      cached_begin_ = first - (first - grid.range_begin) % kTokens;
      cached_end_ = end;
    }
    if (grid.fresh && p.fresh_tokens > 0) {
      const int left = p.window_left >= 0 ? max(0, token_begin - p.window_left) : 0;
      fresh_begin_ = left - left % kTokens;
      fresh_end_ = token_begin + tokens;
    }
    cached_ = (cached_end_ - cached_begin_ + kTokens - 1) / kTokens;
    count_ = cached_ + (fresh_end_ - fresh_begin_ + kTokens - 1) / kTokens;
  }
  __device__ __forceinline__ int count() const { return count_; }
  __device__ __forceinline__ ChunkTile tile(int i) const {
    if (i < cached_) {
      const int position = cached_begin_ + i * kTokens;
      return {min(kTokens, cached_end_ - position), position, position - length_, false};
    }
    const int position = fresh_begin_ + (i - cached_) * kTokens;
    return {min(kTokens, fresh_end_ - position), position, position, true};
  }

 private:
  int length_;
  int cached_begin_, cached_end_, fresh_begin_, fresh_end_;
  int cached_ = 0, count_ = 0;
};

}  // namespace directkv::cuda

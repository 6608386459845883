// The work of one row, cut into units and tiles, from lengths and window.
//
// The query rows of a KV head are numbered t * G + g and cut into blocks of consecutive new tokens;
// a block skips the tiles left of its first query's window. One (row b, KV head k, row block) is a
// unit: the tiles of its cached tokens, then those of its fresh tokens.
#pragma once

#include "../params.h"
#include "device.cuh"

namespace directkv::cuda {

// What the host decides about one attend call.
struct AttendGrid {
  int tokens_per_block, rows_per_block, row_blocks;
  int tile_shift;       // a tile has 1 << tile_shift tokens
  int stages;           // of the ring
  int box_tokens;       // tokens one copy brings: a divisor of page_size and of a tile
  int ctas;             // launched
  int least_tiles;      // of a CTA that has work
  float inverse_group;  // 1 / G

  __host__ __device__ int tile_tokens() const { return 1 << tile_shift; }
};

// Rows are a little shorter than int32 allows, so that sums of a position and a few tokens fit too.
constexpr int kMaxLength = INT32_MAX - (1 << 20);

__device__ __forceinline__ int64_t capacity(const CacheView& cache) {
  return min(int64_t{kMaxLength}, int64_t{cache.max_pages} * cache.layout.page_size);
}

__device__ __forceinline__ bool layer_in_range(const CacheView& cache, int layer) {
  return layer >= 0 && layer < cache.num_layers;
}

// The first cached position that query t sees; `length` where it sees none.
__device__ __forceinline__ int first_seen(int length, int t, int window_left) {
  return window_left < 0 ? 0 : min(max(length + t - window_left, 0), length);
}

struct PageRange {
  int begin, end;
};

// Does this thread see a page id outside the pool among its part of the range? Threads of a CTA
// look at disjoint parts.
__device__ __forceinline__ bool any_bad_page(const int32_t* table_row, PageRange range,
                                             int64_t num_pages) {
  bool bad = false;
  for (int i = range.begin + static_cast<int>(threadIdx.x); i < range.end;
       i += static_cast<int>(blockDim.x)) {
    const int32_t id = table_row[i];
    bad |= id < 0 || id >= num_pages;
  }
  return bad;
}

// What is the same for all units of row b.
struct RowWork {
  int length;  // int32: capacity may be larger, a length is not
  int seq;     // valid queries; 0 also where the row cannot be served

  __device__ __forceinline__ RowWork(int length_, int seq_) : length(length_), seq(seq_) {}
  RowWork() = default;
  __device__ __forceinline__ RowWork(const AttendParams& p, int b) {
    // All loads before the first look at one: they come in one round trip.
    const int layer = load_relaxed(p.cache.layer);
    length = load_relaxed(p.cache.lengths + b);
    seq = load_relaxed(p.seq_lengths + b);
    const bool ok = length >= 0 && length <= capacity(p.cache) && seq >= 0 &&
                    seq <= p.query_tokens && layer_in_range(p.cache, layer);
    if (!ok) length = seq = 0;
    // Without a page there is nothing to copy; the row's ids are out of range in any case.
    if (p.cache.num_pages <= 0) length = 0;
  }
  __device__ __forceinline__ bool operator!=(const RowWork& other) const {
    return length != other.length || seq != other.seq;
  }
};

// What a CTA spends between one unit and the next (queries, fresh tokens, the result), counted in
// tiles.
constexpr int kUnitCost = 2;

// Tiles start at positions that are multiples of their size, and at the first fresh token seen.
struct Unit {
  int token_begin, tokens;  // new tokens of the block that are valid
  int first_tile;           // position >> tile_shift
  int cached_tiles;
  int fresh_first, fresh_last;  // fresh tokens [first, last)
  int tiles;                    // cached and fresh

  Unit() = default;
  __device__ __forceinline__ Unit(const AttendParams& p, const AttendGrid& grid, const RowWork& row,
                                  int row_block) {
    token_begin = row_block * grid.tokens_per_block;
    tokens = max(0, min(grid.tokens_per_block, row.seq - token_begin));
    first_tile = cached_tiles = fresh_first = fresh_last = tiles = 0;
    if (tokens == 0) return;
    const int first = first_seen(row.length, token_begin, p.window_left);
    if (first < row.length) {
      first_tile = first >> grid.tile_shift;
      cached_tiles = ((row.length - 1) >> grid.tile_shift) + 1 - first_tile;
    }
    tiles = cached_tiles;
    if (p.fresh_tokens > 0) {
      fresh_first =
          p.window_left >= 0 && token_begin > p.window_left ? token_begin - p.window_left : 0;
      fresh_last = token_begin + tokens;
      tiles += (fresh_last - fresh_first + grid.tile_tokens() - 1) >> grid.tile_shift;
    }
  }
  // Its stretch of the work list: what it costs, then its tiles.
  __device__ __forceinline__ int cost() const { return tiles > 0 ? kUnitCost : 0; }
  __device__ __forceinline__ int work() const { return cost() + tiles; }
};

// Consecutive tokens of a tile.
struct Tile {
  int count;
  int position;  // of the first: in the row where cached, among the fresh ones where fresh
  int relative;  // the same minus the row's length: fresh tokens have 0 and more
  bool fresh;

  __device__ __forceinline__ Tile(const AttendGrid& grid, const RowWork& row, const Unit& unit,
                                  int index)
      : fresh(index >= unit.cached_tiles) {
    if (fresh) {
      relative = position = unit.fresh_first + ((index - unit.cached_tiles) << grid.tile_shift);
      count = min(grid.tile_tokens(), unit.fresh_last - position);
    } else {
      position = (unit.first_tile + index) << grid.tile_shift;
      relative = position - row.length;
      count = min(grid.tile_tokens(), -relative);
    }
  }
};

// The work of one KV head of a row, all row blocks.
__device__ __forceinline__ int head_work(const AttendParams& p, const AttendGrid& grid,
                                         const RowWork& row) {
  int work = 0;
  for (int block = 0; block < grid.row_blocks; ++block) work += Unit(p, grid, row, block).work();
  return work;
}

}  // namespace directkv::cuda

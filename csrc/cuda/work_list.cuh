// Which tiles a CTA attends to, decided on the device from lengths and window.
//
// The query rows of a KV head are numbered t * G + g and cut into blocks of consecutive new tokens;
// a block skips the tiles left of its first query's window. One (row b, KV head k, row block) is a
// unit: the tiles of its cached tokens, then those of its fresh tokens. The tiles of all units one
// after the other are the work list, and every CTA takes an equal stretch of it, to a tile: an even
// split for any mix of lengths, known to no host. A CTA's part of one unit is a segment.
//
//   units      [ b0 k0          ][ b0 k1          ][ b1 k0 ][ b1 k1 ]
//   CTAs       [ 0       ][ 1       ][ 2       ][ 3       ][ 4     ]
//
// A unit that lies in one CTA is finished there. The first segment of a CTA may be the rest of a
// unit and its last the beginning of one: partial states, merged by merge.cuh.
#pragma once

#include "../params.h"
#include "attend_plan.h"
#include "device.cuh"

namespace directkv::cuda {

// What the host decides about one attend call.
struct AttendGrid {
  int tokens_per_block, rows_per_block, row_blocks;
  int tile_shift;       // a tile has 1 << tile_shift tokens
  int stages;           // of the ring
  int box_tokens;       // tokens one copy brings: a divisor of page_size and of a tile
  int ctas;             // launched
  float inverse_group;  // 1 / G

  __host__ __device__ int tile_tokens() const { return 1 << tile_shift; }
};

// Rows are a little shorter than int32 allows, so that sums of a position and a few tokens fit too.
constexpr int kMaxLength = INT32_MAX - (1 << 20);

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

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

__device__ __forceinline__ int64_t capacity(const CacheView& cache) {
  return min(int64_t{kMaxLength}, int64_t{cache.max_pages} * cache.layout.page_size);
}

__device__ __forceinline__ bool layer_in_range(const CacheView& cache, int layer) {
  return layer >= 0 && layer < cache.num_layers;
}

// The first cached position that query t sees; `length` where it sees none.
__device__ __forceinline__ int64_t first_seen(int64_t length, int t, int window_left) {
  if (window_left < 0) return 0;
  const int64_t first = length + t - window_left;
  return first < 0 ? 0 : first < length ? first : length;
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
    const int layer = *p.cache.layer;
    length = p.cache.lengths[b];
    seq = p.seq_lengths[b];
    const bool ok = length >= 0 && length <= capacity(p.cache) && seq >= 0 &&
                    seq <= p.query_tokens && layer_in_range(p.cache, layer);
    if (!ok) length = seq = 0;
    // Without a page there is nothing to copy; the row's ids are out of range in any case.
    if (p.cache.num_pages <= 0) length = 0;
  }
};

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
    const int first = static_cast<int>(first_seen(row.length, token_begin, p.window_left));
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

// Tiles of one KV head of a row, all row blocks.
__device__ __forceinline__ int head_tiles(const AttendParams& p, const AttendGrid& grid,
                                          const RowWork& row) {
  int tiles = 0;
  for (int block = 0; block < grid.row_blocks; ++block) tiles += Unit(p, grid, row, block).tiles;
  return tiles;
}

// 32 rows of the work list, one for each lane of a warp: tiles of one KV head of the row, and of
// all rows up to and including it.
struct RowGroup {
  RowWork row;
  int per_head, end;

  __device__ __forceinline__ RowGroup(const AttendParams& p, const AttendGrid& grid, int base,
                                      int before) {
    const int b = base + lane_id();
    row = RowWork(p, min(b, p.cache.batch - 1));
    per_head = b < p.cache.batch ? head_tiles(p, grid, row) : 0;
    end = per_head * p.cache.layout.kv_heads;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(kFullWarp, end, offset);
      if (lane_id() >= offset) end += below;
    }
    end += before;
  }
  // Tiles of all rows up to the last of the group.
  __device__ __forceinline__ int total() const { return __shfl_sync(kFullWarp, end, 31); }
};

// The even split: CTA c has tiles [begin(c), begin(c + 1)), the first few CTAs one more than the
// rest.
struct WorkSplit {
  int ctas;  // that have work: of less than two tiles the rest costs more than it saves
  int each, rest;

  __device__ __forceinline__ WorkSplit(const AttendGrid& grid, int total)
      : ctas(min(grid.ctas, (total + 1) / 2)),
        each(ctas > 0 ? total / ctas : 0),
        rest(total - each * ctas) {}
  __device__ __forceinline__ int begin(int c) const { return each * c + min(c, rest); }
  // The CTA that has a tile.
  __device__ __forceinline__ int cta_of(int tile) const {
    const int longer = rest * (each + 1);  // tiles of the first `rest` CTAs
    return tile < longer ? tile / (each + 1) : rest + (tile - longer) / each;
  }
};

struct Segment {
  int b, k;
  RowWork row;
  Unit unit;
  int tile_begin, tile_end;  // of the unit's tiles

  __device__ __forceinline__ bool whole() const {
    return tile_begin == 0 && tile_end == unit.tiles;
  }
};

// Walks the segments of this CTA. All lanes of a warp do the same.
class WorkCursor {
 public:
  __device__ __forceinline__ WorkCursor(const AttendParams& p, const AttendGrid& grid) {
    const int c = static_cast<int>(blockIdx.x);
    RowGroup group(p, grid, 0, 0);
    int total = group.total();
    for (int base = 32; base < p.cache.batch; base += 32)
      total = RowGroup(p, grid, base, total).total();
    const WorkSplit split(grid, total);
    if (c >= split.ctas) return;
    const int begin = split.begin(c);
    left_ = split.begin(c + 1) - begin;
    // The row that holds tile `begin`.
    for (int base = 0, before = 0;; before = group.total(), base += 32) {
      if (base > 0) group = RowGroup(p, grid, base, before);
      const unsigned beyond = __ballot_sync(kFullWarp, begin < group.end);
      if (beyond == 0) continue;
      const int lane = __ffs(static_cast<int>(beyond)) - 1;
      b_ = base + lane;
      row_ = {__shfl_sync(kFullWarp, group.row.length, lane),
              __shfl_sync(kFullWarp, group.row.seq, lane)};
      const int per_head = __shfl_sync(kFullWarp, group.per_head, lane);
      tile_ = begin - __shfl_sync(kFullWarp, group.end, lane) + per_head * p.cache.layout.kv_heads;
      k_ = tile_ / per_head;
      tile_ -= k_ * per_head;  // next() walks on to the row block
      return;
    }
  }

  // The next segment into `*segment`; false: there is none.
  __device__ __forceinline__ bool next(const AttendParams& p, const AttendGrid& grid,
                                       Segment* segment) {
    while (left_ > 0) {
      const Unit unit(p, grid, row_, block_);
      if (tile_ < unit.tiles) {
        const int end = min(unit.tiles, tile_ + left_);
        *segment = {b_, k_, row_, unit, tile_, end};
        left_ -= end - tile_;
        tile_ = end;
        return true;
      }
      tile_ -= unit.tiles;
      if (++block_ == grid.row_blocks) {
        block_ = 0;
        if (++k_ == p.cache.layout.kv_heads) {
          k_ = 0;
          row_ = RowWork(p, ++b_);  // there is one: tiles are left
        }
      }
    }
    return false;
  }

 private:
  int left_ = 0;  // tiles of this CTA not yet given out
  int b_ = 0, k_ = 0, block_ = 0;
  RowWork row_;   // of b_
  int tile_ = 0;  // in the unit; may lie beyond it, in a later one
};

// The query rows of a segment.
struct QueryRows {
  int64_t first;  // query of (b, t = 0, first head of k)
  int count, group, heads;
  int token_begin;
  float inverse_group;

  __device__ __forceinline__ QueryRows(const AttendParams& p, const AttendGrid& grid,
                                       const Segment& s)
      : group(p.query_heads / p.cache.layout.kv_heads),
        heads(p.query_heads),
        token_begin(s.unit.token_begin),
        inverse_group(grid.inverse_group) {
    count = s.unit.tokens * group;
    first = int64_t{s.b} * p.query_tokens * heads + int64_t{s.k} * group;
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

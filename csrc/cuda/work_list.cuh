// Which tiles a CTA attends to, decided on the device.
//
// The work of all units (units.cuh) one after the other is the work list, counted in tiles, and
// every CTA takes an equal stretch of it, to a tile: an even split for any mix of lengths, known to
// no host. The tiles of one unit in a CTA's stretch are a segment.
//
//   units      [ b0 k0          ][ b0 k1          ][ b1 k0 ][ b1 k1 ]
//   CTAs       [ 0       ][ 1       ][ 2       ][ 3       ][ 4     ]
//
// A unit that lies in one CTA is finished there. The first segment of a CTA may be the rest of a
// unit and its last the beginning of one: partial states, merged by merge.cuh.
#pragma once

#include "units.cuh"

namespace directkv::cuda {

// 32 rows of the work list, one for each lane of a warp: the work of one KV head of the row, and of
// all rows up to and including it.
struct RowGroup {
  RowWork row;
  int per_head, end;

  // The row of this lane, of the rows from `base` on.
  static __device__ __forceinline__ RowWork load(const AttendParams& p, int base) {
    return RowWork(p, min(base + lane_id(), p.cache.batch - 1));
  }
  __device__ __forceinline__ RowGroup(const AttendParams& p, const AttendGrid& grid, int base,
                                      int before)
      : RowGroup(p, grid, load(p, base), base, before) {}
  __device__ __forceinline__ RowGroup(const AttendParams& p, const AttendGrid& grid,
                                      const RowWork& loaded, int base, int before)
      : row(loaded) {
    per_head = base + lane_id() < p.cache.batch ? head_work(p, grid, row) : 0;
    end = per_head * p.cache.layout.kv_heads;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int below = __shfl_up_sync(kFullWarp, end, offset);
      if (lane_id() >= offset) end += below;
    }
    end += before;
  }
  // The work of all rows up to the last of the group.
  __device__ __forceinline__ int total() const { return __shfl_sync(kFullWarp, end, 31); }
};

// The even split: CTA c has the work [begin(c), begin(c + 1)), the first few CTAs one more than the
// rest.
struct WorkSplit {
  int ctas;  // that have work
  int each, rest;

  __device__ __forceinline__ WorkSplit(const AttendGrid& grid, int total)
      : ctas(min(grid.ctas, (total + grid.least_tiles - 1) / grid.least_tiles)),
        each(ctas > 0 ? total / ctas : 0),
        rest(total - each * ctas) {}
  __device__ __forceinline__ int begin(int c) const { return each * c + min(c, rest); }
  // The CTA that has a tile, by its place in the work list.
  __device__ __forceinline__ int cta_of(int tile) const {
    const int longer = rest * (each + 1);  // work of the first `rest` CTAs
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
  // Waits for the earlier kernels of the stream, and goes to the first segment, as next() does. It
  // is found before they have ended, from what the lengths are by then, and again if they changed.
  // After a projection the lengths stand, and nothing is waited for.
  __device__ __forceinline__ bool start(const AttendParams& p, const AttendGrid& grid) {
    RowWork first = RowGroup::load(p, 0);
    bool any;
#pragma unroll 1
    for (bool early = true;; early = false) {
      go_to_begin(p, grid, first);
      any = next(p, grid);
      if (!early) return any;
      if (!p.projected) wait_for_earlier_kernels();
      let_next_kernel_start();
      if (p.projected) return any;
      const RowWork now = RowGroup::load(p, 0);
      if (p.cache.batch <= 32 && !__any_sync(kFullWarp, now != first)) return any;
      first = now;
    }
  }

  // Goes to the next segment; false: there is none.
  __device__ __forceinline__ bool next(const AttendParams& p, const AttendGrid& grid) {
    while (left_ > 0) {
      const Unit unit(p, grid, row_, block_);
      if (at_ < unit.work()) {
        const int end = min(unit.work(), at_ + left_), tile_begin = max(0, at_ - unit.cost());
        segment_ = {b_, k_, row_, unit, tile_begin, end - unit.cost()};
        left_ -= end - at_;
        at_ = end;
        if (tile_begin < segment_.tile_end) return true;
        continue;  // the stretch ends before the unit's first tile
      }
      at_ -= unit.work();
      if (++block_ == grid.row_blocks) {
        block_ = 0;
        if (++k_ == p.cache.layout.kv_heads) {
          k_ = 0;
          row_ = RowWork(p, ++b_);  // there is one: work is left
        }
      }
    }
    return false;
  }

  __device__ __forceinline__ const Segment& segment() const { return segment_; }

 private:
  // `first`: the row of this lane, RowGroup::load(p, 0).
  __device__ __forceinline__ void go_to_begin(const AttendParams& p, const AttendGrid& grid,
                                              const RowWork& first) {
    left_ = block_ = 0;
    const int c = static_cast<int>(blockIdx.x);
    RowGroup group(p, grid, first, 0, 0);
    int total = group.total();
    for (int base = 32; base < p.cache.batch; base += 32)
      total = RowGroup(p, grid, base, total).total();
    const WorkSplit split(grid, total);
    if (c >= split.ctas) return;
    const int begin = split.begin(c);
    // The row that holds `begin`. There is none where lengths change while they are read.
    for (int base = 0, before = 0; base < p.cache.batch; before = group.total(), base += 32) {
      if (base > 0) group = RowGroup(p, grid, base, before);
      const unsigned beyond = __ballot_sync(kFullWarp, begin < group.end);
      if (beyond == 0) continue;
      const int lane = __ffs(static_cast<int>(beyond)) - 1;
      b_ = base + lane;
      row_ = {__shfl_sync(kFullWarp, group.row.length, lane),
              __shfl_sync(kFullWarp, group.row.seq, lane)};
      const int per_head = __shfl_sync(kFullWarp, group.per_head, lane);
      at_ = begin - __shfl_sync(kFullWarp, group.end, lane) + per_head * p.cache.layout.kv_heads;
      k_ = at_ / per_head;
      at_ -= k_ * per_head;  // next() walks on to the row block
      left_ = split.begin(c + 1) - begin;
      return;
    }
  }

  int left_ = 0;  // work of this CTA not yet given out
  int b_ = 0, k_ = 0, block_ = 0;
  RowWork row_;  // of b_
  int at_ = 0;   // in the unit's work; may lie beyond it, in a later one
  Segment segment_;
};

}  // namespace directkv::cuda

// The attend kernel: partial softmax states of every split into the workspace.
//
// Grid: ((b * K + k) * row_blocks + row block) * splits + split. A CTA whose rows hold no valid
// query leaves at once; one whose split is empty writes the empty state, so that merge_kernel reads
// no slot that nobody wrote.
#pragma once

#include "merge.cuh"
#include "tile_compute.cuh"

namespace directkv::cuda {

// How the query rows of a KV head are cut into blocks and its pages into splits.
struct AttendGrid {
  int rows_per_block, row_blocks, splits;
};

// Two CTAs per SM, as kTargetBlocks of attend_plan.h counts on: at most 128 registers.
template <typename Shape>
__global__ void __launch_bounds__(kAttendThreads, 2)
    attend_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ AttendGrid grid) {
  const CacheView& cache = p.cache;
  const int kv_heads = cache.layout.kv_heads, group = p.query_heads / kv_heads;
  int64_t rest = blockIdx.x;
  const int split = static_cast<int>(rest % grid.splits);
  rest /= grid.splits;
  const int row_begin = static_cast<int>(rest % grid.row_blocks) * grid.rows_per_block;
  rest /= grid.row_blocks;
  const int k = static_cast<int>(rest % kv_heads), b = static_cast<int>(rest / kv_heads);

  const int seq = p.seq_lengths[b];
  const bool seq_ok = seq >= 0 && seq <= p.query_tokens;
  const int valid_rows = (seq_ok ? seq : p.query_tokens) * group;
  if (row_begin >= valid_rows) return;
  const int rows = min(grid.rows_per_block, valid_rows - row_begin);
  const int t_first = row_begin / group, t_last = (row_begin + rows - 1) / group;

  const PartialStates states(p, grid.splits);
  const auto query_row = [&](int r) {
    const int row = row_begin + r, t = row / group;
    const int64_t query =
        (int64_t{b} * p.query_tokens + t) * p.query_heads + k * group + (row - t * group);
    return QueryRow{query * Shape::kHeadDim, split * states.queries + query, t};
  };

  // Can the row be served? Page ids are looked at before any of them is followed: those of this
  // split, and this split's share of those that other row blocks need (with a window they need
  // others), so that one bad id makes all valid queries of the row NaN.
  const int64_t length = cache.lengths[b];
  const int layer = *cache.layer;
  const int32_t* table_row = cache.page_table + int64_t{b} * cache.max_pages;
  const int page_size = cache.layout.page_size;
  bool bad = !seq_ok || length < 0 || length > capacity(cache) || !layer_in_range(cache, layer);
  PageRange pages = {0, 0};
  if (!bad) {
    pages = page_share(first_seen(length, t_first, p.window_left), length, page_size, split,
                       grid.splits);
    bad = any_bad_page(table_row, pages, cache.num_pages);
    if (t_first > 0 && p.window_left >= 0) {
      const PageRange whole =
          page_share(first_seen(length, 0, p.window_left), length, page_size, split, grid.splits);
      bad |= any_bad_page(table_row, whole, cache.num_pages);
    }
  }
  bad = __syncthreads_or(bad);
  const int thread = static_cast<int>(threadIdx.x);
  if (bad) {
    if (thread < rows) {
      states.m[query_row(thread).slot] = NAN;
      states.l[query_row(thread).slot] = NAN;
    }
    return;
  }
  const Share share = make_share(p, pages, length, seq, t_first, t_last, split == grid.splits - 1);
  if (share.empty()) {
    if (thread < rows) {
      states.m[query_row(thread).slot] = -INFINITY;
      states.l[query_row(thread).slot] = 0.0f;
    }
    return;
  }

  unsigned char* const shared = dynamic_shared();
  __shared__ TileSource source;
  if (thread == 0) {
    const int64_t fresh = (int64_t{b} * p.fresh_tokens * kv_heads + k) * Shape::kTokenBytes;
    source.tiles = static_cast<const unsigned char*>(cache.pages) +
                   cache.layout.tile_offset(layer, cache.num_pages, 0, k);
    source.fresh_key = static_cast<const unsigned char*>(p.key) + fresh;
    source.fresh_value = static_cast<const unsigned char*>(p.value) + fresh;
    source.table_row = table_row;
    source.page_bytes = cache.layout.page_bytes();
    source.fresh_stride = int64_t{kv_heads} * Shape::kTokenBytes;
    source.value_offset = page_size * Shape::kTokenBytes;
    source.last_page = share.last_page;
  }
  __syncthreads();
  TileRing<Shape> ring(share, page_size, shared + Shape::kStagesAt, &source);
  TileCompute<Shape> compute(shared, {p.scale, p.soft_cap, p.window_left}, rows);
  compute.load_queries(static_cast<const unsigned char*>(p.query), query_row);
  for (FetchedTile tile = ring.take(); tile.count > 0; tile = ring.take()) compute.add(tile);
  ring.drain();
  compute.finish(states.m, states.l, states.o);
}

// Launches the instance for `rows_per_block` rows: the smallest of its row classes that holds them.
template <DType kDType, int kHeadDim>
cudaError_t launch_attend(const AttendParams& p, const AttendGrid& grid, cudaStream_t stream) {
  const int64_t blocks =
      int64_t{p.cache.batch} * p.cache.layout.kv_heads * grid.row_blocks * grid.splits;
  const auto launch_shape = [&](auto shape) {
    using Shape = decltype(shape);
    return launch(attend_kernel<Shape>, blocks, kAttendThreads, Shape::kSharedBytes, stream, p,
                  grid);
  };
  if (grid.rows_per_block <= 4) return launch_shape(TileShape<kDType, kHeadDim, 4>{});
  if (grid.rows_per_block <= 16) return launch_shape(TileShape<kDType, kHeadDim, 16>{});
  return launch_shape(TileShape<kDType, kHeadDim, max_rows(kHeadDim)>{});
}

}  // namespace directkv::cuda

// The chunk kernel: CTAs that copy pages over the link, and CTAs that attend to what an earlier
// launch has copied. See chunk_plan.h.
#pragma once

#include "chunk_attention.cuh"
#include "stage_ring.cuh"
#include "tile_map.cuh"

namespace directkv::cuda {

// Copies the pages of a range that any query sees, row by row, into a slot of the ring. The warps
// of all copying CTAs take runs of 4 KiB in turn.
__device__ __forceinline__ void copy_range(const AttendParams& p, const ChunkGrid& grid) {
  constexpr int kInFlight = kCopyRunBytes / 512;
  const CacheView& cache = p.cache;
  const PageLayout& layout = cache.layout;
  const int runs = static_cast<int>(layout.page_bytes() / kCopyRunBytes);
  const int first_page = grid.copy_begin / layout.page_size, layer = *cache.layer;
  const int thread = static_cast<int>(blockIdx.x) * kChunkThreads + static_cast<int>(threadIdx.x);
  const int warps = grid.copy_ctas * (kChunkThreads / 32);
  for (int b = 0; b < cache.batch; ++b) {
    const RowWork row(p, b);
    if (row.seq == 0) continue;
    const int seen = max(grid.copy_begin, first_seen(row.length, 0, p.window_left));
    const int64_t begin = int64_t{seen / layout.page_size} * runs;
    const int end_page = (min(grid.copy_end, row.length) + layout.page_size - 1) / layout.page_size;
    const int32_t* const table = cache.page_table + int64_t{b} * cache.max_pages;
    unsigned char* const slot =
        grid.copy_to + (int64_t{b} * grid.slot_row_pages - first_page) * layout.page_bytes();
    for (int64_t i = begin + thread / 32; i < int64_t{end_page} * runs; i += warps) {
      const int page = static_cast<int>(i / runs), id = table[page];
      if (id < 0 || id >= cache.num_pages) continue;
      const int64_t at = (i - int64_t{page} * runs) * kCopyRunBytes + lane_id() * 16;
      const auto* const from =
          reinterpret_cast<const uint4*>(static_cast<const unsigned char*>(cache.pages) +
                                         layout.tile_offset(layer, cache.num_pages, id, 0) + at);
      auto* const to = reinterpret_cast<uint4*>(slot + page * layout.page_bytes() + at);
      uint4 data[kInFlight];
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) data[u] = load_once(from + u * 32);
#pragma unroll
      for (int u = 0; u < kInFlight; ++u) to[u * 32] = data[u];
    }
  }
}

// The maps of the copies into shared memory.
struct ChunkMaps {
  TileMap pages;        // of the cache, or of a slot
  TokenMap key, value;  // of the new tokens
};

// The producers: one warp fetches the keys, another the values.
template <typename Shape>
class ChunkProducer {
 public:
  using Ring = StageRing<Shape::kStages, Shape::kTileBytes>;

  __device__ __forceinline__ ChunkProducer(const AttendParams& p, const ChunkGrid& grid,
                                           const ChunkMaps& maps, int b, int k)
      : p_(p), grid_(grid), maps_(maps), b_(b), k_(k), layer_(*p.cache.layer) {}

  template <typename Tiles>
  __device__ __forceinline__ void fetch(const Tiles& tiles, Ring ring, bool value) {
    for (int i = 0; i < tiles.count(); ++i) {
      const ChunkTile tile = tiles.tile(i);
      ring.acquire();
      unsigned char* const stage = ring.stage();
      Barrier* const full = ring.full();
      if (!tile.fresh) {
        fetch_cached(tile, stage, full, value);
      } else if (lane_id() == 0) {  // what lies beyond the last new token comes as zeros
        barrier_arrive_expecting(full, Shape::kTileBytes);
        copy_tokens(stage, value ? &maps_.value : &maps_.key, tile.position, k_ * Shape::kSpans, b_,
                    full);
      }
      ring.advance();
    }
  }

 private:
  __device__ __forceinline__ void fetch_cached(const ChunkTile& tile, unsigned char* stage,
                                               Barrier* full, bool value) {
    const int page_size = p_.cache.layout.page_size, box = grid_.box_tokens;
    const int boxes = (tile.count + box - 1) / box;
    if (lane_id() == 0) barrier_arrive_expecting(full, boxes * box * Shape::kHeadDim * 2);
    __syncwarp();
    // One copy for all spans where a box is a whole tile, else one for each.
    const int spans = box != Shape::kTokens ? Shape::kSpans : 1;
    for (int i = lane_id(); i < boxes * spans; i += 32) {
      const int token = i / spans * box, span = i % spans, position = tile.position + token;
      const int page = position / page_size;
      const int row = (value ? page_size : 0) + position - page * page_size;
      copy_box(stage + span * Shape::kSpanBytes + token * kSwizzledBytes, &maps_.pages, row,
               stored_tile(page), span, full);
    }
    __syncwarp();
  }

  // Where the map has this KV head of a page of the row; page 0 for an id out of range.
  __device__ __forceinline__ int stored_tile(int page) const {
    const CacheView& cache = p_.cache;
    int64_t at;
    if (grid_.slot) {
      at = int64_t{b_} * grid_.slot_row_pages + page - grid_.range_begin / cache.layout.page_size;
    } else {
      const int id = cache.page_table[int64_t{b_} * cache.max_pages + page];
      at = layer_ * cache.num_pages + (id >= 0 && id < cache.num_pages ? id : 0);
    }
    return static_cast<int>(at * cache.layout.kv_heads + k_);
  }

  const AttendParams& p_;
  const ChunkGrid& grid_;
  const ChunkMaps& maps_;
  int b_, k_;
  int64_t layer_;
};

// Answers for queries that attended to nothing: not valid ones, and those of a row that cannot be
// served.
template <DType kDType, int kHeadDim>
__device__ __forceinline__ void answer_others(const AttendParams& p, int b, int k, int token_begin,
                                              int token_end, int valid, bool bad) {
  using E = typename Element<kDType>::type;
  const int group = p.query_heads / p.cache.layout.kv_heads;
  const int first = bad ? token_begin : max(token_begin, valid);
  for (int i = static_cast<int>(threadIdx.x); i < (token_end - first) * group * kHeadDim;
       i += kChunkThreads) {
    const int h = i % kHeadDim, r = i / kHeadDim, t = first + r / group;
    const int64_t query = (int64_t{b} * p.query_tokens + t) * p.query_heads + k * group + r % group;
    const bool nan = bad && t < valid;
    static_cast<E*>(p.out)[query * kHeadDim + h] = Element<kDType>::from_float(nan ? NAN : 0.0f);
    if (h == 0) p.lse[query] = nan ? NAN : -INFINITY;
  }
}

// Whether row b cannot be served: all its valid queries give NaN.
__device__ __forceinline__ bool bad_row(const AttendParams& p, int b) {
  const CacheView& cache = p.cache;
  const int64_t length = cache.lengths[b];
  const int seq = p.seq_lengths[b], page_size = cache.layout.page_size;
  bool bad = seq < 0 || seq > p.query_tokens || length < 0 || length > capacity(cache) ||
             !layer_in_range(cache, *cache.layer);
  if (!bad && seq > 0) {
    const int first = first_seen(static_cast<int>(length), 0, p.window_left);
    const PageRange pages = {first / page_size,
                             static_cast<int>((length + page_size - 1) / page_size)};
    bad = first < length &&
          any_bad_page(cache.page_table + int64_t{b} * cache.max_pages, pages, cache.num_pages);
  }
  return __syncthreads_or(bad);
}

template <DType kDType, int kHeadDim>
__global__ void __launch_bounds__(kChunkThreads, 1)
    chunk_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ ChunkGrid grid,
                 const __grid_constant__ ChunkMaps maps) {
#if DIRECTKV_WARPGROUPS
  using Shape = ChunkShape<kDType, kHeadDim>;
  using Attention = ChunkAttention<kDType, kHeadDim>;
  using Ring = StageRing<Shape::kStages, Shape::kTileBytes>;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (static_cast<int>(blockIdx.x) < grid.copy_ctas) return copy_range(p, grid);

  const int kv_heads = p.cache.layout.kv_heads,
            unit = static_cast<int>(blockIdx.x) - grid.copy_ctas;
  const int block = unit % grid.row_blocks, k = unit / grid.row_blocks % kv_heads;
  const int b = unit / grid.row_blocks / kv_heads;
  const int token_begin = block * grid.tokens_per_block;
  const RowWork row(p, b);
  const int tokens = max(0, min(grid.tokens_per_block, row.seq - token_begin));
  const ChunkTiles<Shape::kTokens> tiles(p, grid, row, token_begin, tokens);
  if (grid.last) {
    const bool bad = bad_row(p, b);
    // Of a bad row with a valid number of queries, those are NaN and the others zeros.
    const int seq = p.seq_lengths[b],
              valid = seq < 0 || seq > p.query_tokens ? p.query_tokens : seq;
    answer_others<kDType, kHeadDim>(
        p, b, k, token_begin, min(token_begin + grid.tokens_per_block, p.query_tokens), valid, bad);
    if (bad) return;
  }
  if (tokens == 0 || (tiles.count() == 0 && !grid.first && !grid.last)) return;

  unsigned char* const shared = dynamic_shared();
  unsigned char* const stages = shared + Shape::kQueryBytes;
  Barrier* const barriers =
      reinterpret_cast<Barrier*>(stages + 2 * Shape::kStages * Shape::kTileBytes);
  Ring keys(stages, barriers);
  Ring values(stages + Shape::kStages * Shape::kTileBytes, barriers + 2 * Shape::kStages);
  if (threadIdx.x == 0) {
    if (grid.range_begin < grid.range_end) prefetch_map(&maps.pages);
    keys.init(1, 2 * kWarpgroup / 32);
    values.init(1, 2 * kWarpgroup / 32);
    barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= 2 * kWarpgroup) {
    give_registers<40>();
    const bool value = threadIdx.x >= 2 * kWarpgroup + 32;
    if (threadIdx.x < 2 * kWarpgroup + 64)
      ChunkProducer<Shape>(p, grid, maps, b, k).fetch(tiles, value ? values : keys, value);
    return;
  }
  take_registers<232>();
  Attention attention(p, QueryRows(p, grid.inverse_group, b, k, token_begin, tokens), shared);
  float* const state = grid.states + int64_t{unit} * Attention::kStateFloats;
  if (!grid.first) attention.load_state(state);
  if (tiles.count() > 0) {
    attention.load_queries(p);
    attention.add(tiles, keys, values);
  }
  if (grid.last) {
    attention.finish(p);
  } else {
    attention.store_state(state);
  }
#endif
}

}  // namespace directkv::cuda

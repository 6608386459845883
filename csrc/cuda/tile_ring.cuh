// The ring of shared-memory stages between the warp that fetches tiles and the warps that compute.
//
// Stage s has two barriers: `full` ends a phase when the tile has arrived, `empty` when all
// consumer warps are done with it. The producer warp runs ahead through the CTA's segments until
// all stages are full.
#pragma once

#include "query_rows.cuh"
#include "tile_shape.cuh"
#include "work_list.cuh"

namespace directkv::cuda {

// Both sides walk the ring in the same order.
struct RingPosition {
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename Shape>
class TileRing {
 public:
  static constexpr int kBytes = Shape::kStageBytes + 16;  // of a stage with its barriers

  __device__ __forceinline__ TileRing(unsigned char* shared, int stages)
      : stages_(stages),
        storage_(shared),
        barriers_(reinterpret_cast<Barrier*>(shared + stages * Shape::kStageBytes)) {}

  // One thread, before the __syncthreads() after which the ring is used.
  __device__ __forceinline__ void init(int consumer_warps) {
    for (int s = 0; s < stages_; ++s) {
      barrier_init(full(s), 32);
      barrier_init(empty(s), consumer_warps);
    }
    barrier_init_fence();
  }

  __device__ __forceinline__ Barrier* full(int stage) { return barriers_ + 2 * stage; }
  __device__ __forceinline__ Barrier* empty(int stage) { return barriers_ + 2 * stage + 1; }
  __device__ __forceinline__ unsigned char* stage(int s) {
    return storage_ + s * Shape::kStageBytes;
  }

  // Consumers: waits for the stage whose turn it is.
  __device__ __forceinline__ unsigned char* take(const RingPosition& at) {
    barrier_wait(full(at.stage), at.parity);
    __syncwarp();
    return stage(at.stage);
  }
  // Consumers, every warp: gives it back. `written`: by ordinary stores, or 16-byte copies.
  __device__ __forceinline__ void release(RingPosition* at, bool written) {
    if (written) fence_before_bulk_copies();
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(empty(at->stage));
    at->advance(stages_);
  }

  __device__ __forceinline__ int count() const { return stages_; }

 private:
  int stages_;
  unsigned char* storage_;
  Barrier* barriers_;
};

// The producer warp.
template <typename Shape>
class TileProducer {
 public:
  __device__ __forceinline__ TileProducer(const AttendParams& p, const AttendGrid& grid,
                                          const TileMap* map, TileRing<Shape> ring)
      : p_(p), grid_(grid), map_(map), ring_(ring), layer_(*p.cache.layer) {}

  // Fetches every tile of a segment.
  __device__ __forceinline__ void fetch(const Segment& segment) {
    for (int i = segment.tile_begin; i < segment.tile_end; ++i) {
      const Tile tile(grid_, segment.row, segment.unit, i);
      acquire();
      if (tile.fresh) {
        fetch_fresh(segment, tile);
      } else {
        fetch_cached(segment, tile);
      }
      at_.advance(ring_.count());
    }
  }

 private:
  __device__ __forceinline__ void acquire() {
    barrier_wait(ring_.empty(at_.stage), at_.parity ^ 1);
    __syncwarp();
  }

  // The id of a page of the row; 0 where it is out of range: such a row gives NaN in the end.
  __device__ __forceinline__ int page_id(const Segment& segment, int page) const {
    const int id = p_.cache.page_table[int64_t{segment.b} * p_.cache.max_pages + page];
    return id >= 0 && id < p_.cache.num_pages ? id : 0;
  }

  // Index of the tile of the cache that holds the page for this layer and KV head.
  __device__ __forceinline__ int64_t cache_tile(const Segment& segment, int page) const {
    const CacheView& cache = p_.cache;
    return (layer_ * cache.num_pages + page_id(segment, page)) * cache.layout.kv_heads + segment.k;
  }

  // Whole boxes are copied, which may reach beyond the length, never beyond the page.
  __device__ __forceinline__ void fetch_cached(const Segment& segment, const Tile& tile) {
    unsigned char* const stage = ring_.stage(at_.stage);
    Barrier* const full = ring_.full(at_.stage);
    const int page_size = p_.cache.layout.page_size, box = grid_.box_tokens;
#if DIRECTKV_BULK_COPIES
    const int boxes = (tile.count + box - 1) / box;
    if (lane_id() == 0) barrier_arrive_expecting(full, boxes * box * 2 * Shape::kTokenBytes);
    __syncwarp();
    // One copy for all spans where a box is a whole tile, else one for each: see CopyBox.
    const int spans = Shape::kSwizzled && box != Shape::kTokens ? Shape::kSpans : 1;
    for (int i = lane_id(); i < boxes * 2 * spans; i += 32) {
      const int token = i / (2 * spans) * box, half = i / spans % 2, span = i % spans;
      const int position = tile.position + token, page = position / page_size;
      const int row = half * page_size + position - page * page_size;
      const int64_t from = cache_tile(segment, page);
      unsigned char* const to = stage + half * Shape::kHalfBytes +
                                span * Shape::kTokens * Shape::kSpanBytes +
                                token * Shape::kSpanBytes;
      if constexpr (Shape::kSwizzled) {
        copy_box(to, map_, row, static_cast<int>(from), span, full);
      } else {
        copy_run(to,
                 static_cast<const unsigned char*>(p_.cache.pages) +
                     (from * 2 * page_size + row) * Shape::kTokenBytes,
                 box * Shape::kTokenBytes, full);
      }
    }
    if (lane_id() != 0) barrier_arrive(full);
#else
    const unsigned char* const pages = static_cast<const unsigned char*>(p_.cache.pages);
    for (int token = 0; token < tile.count; token += box) {
      const int position = tile.position + token, page = position / page_size;
      const unsigned char* const from = pages +
                                        cache_tile(segment, page) * p_.cache.layout.tile_bytes() +
                                        int64_t{position - page * page_size} * Shape::kTokenBytes;
      copy_rows(stage, token, min(box, tile.count - token), from,
                from + int64_t{page_size} * Shape::kTokenBytes, Shape::kTokenBytes);
    }
    barrier_arrive_after_copies(full);
#endif
  }

  __device__ __forceinline__ void fetch_fresh(const Segment& segment, const Tile& tile) {
    if (p_.projected) wait_for_projection(p_, segment.b, segment.k);
    const int64_t stride = int64_t{p_.cache.layout.kv_heads} * Shape::kTokenBytes;
    const int64_t first = (int64_t{segment.b} * p_.fresh_tokens + tile.position) * stride +
                          int64_t{segment.k} * Shape::kTokenBytes;
    copy_rows(ring_.stage(at_.stage), 0, tile.count,
              static_cast<const unsigned char*>(p_.key) + first,
              static_cast<const unsigned char*>(p_.value) + first, stride);
    barrier_arrive_after_copies(ring_.full(at_.stage));
  }

  // `count` tokens to places `token` and after, piece by piece.
  __device__ __forceinline__ void copy_rows(unsigned char* stage, int token, int count,
                                            const unsigned char* key, const unsigned char* value,
                                            int64_t stride) {
#pragma unroll 4
    for (int i = lane_id(); i < count * Shape::kPieces; i += 32) {
      const int t = i / Shape::kPieces, piece = i % Shape::kPieces;
      unsigned char* const to = stage + Shape::offset(token + t, piece);
      copy_async_16(to, key + t * stride + piece * 16);
      copy_async_16(to + Shape::kHalfBytes, value + t * stride + piece * 16);
    }
  }

  const AttendParams& p_;
  const AttendGrid& grid_;
  const TileMap* map_;
  TileRing<Shape> ring_;
  int64_t layer_;
  RingPosition at_;
};

}  // namespace directkv::cuda

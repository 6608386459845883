// Fetches the tiles of a share into a ring of shared-memory stages, ahead of their use.
//
// Every thread copies its part of each tile by 16-byte asynchronous copies, from the cache in host
// or device memory or from the fresh keys and values. (A producer warp with bulk copies on
// mbarriers takes this header's place later.)
#pragma once

#include "tile_shape.cuh"
#include "work_split.cuh"

namespace directkv::cuda {

// Where a CTA's tiles come from. It lies in shared memory: in registers these constants would cost
// every thread a tenth of its budget through the whole loop.
struct TileSource {
  const unsigned char* tiles;        // tile of (layer, page 0, this KV head)
  const unsigned char* fresh_key;    // first fresh key of this row and KV head
  const unsigned char* fresh_value;  // neither is used without fresh tokens
  const int32_t* table_row;          // all pages of the share are known to be inside the pool
  int64_t page_bytes;
  int64_t fresh_stride;  // bytes from one fresh token to the next
  int value_offset;      // bytes from a tile's first key to its first value
  int last_page;         // of the share
  Tile in_flight[4];     // what the stages hold
};

// A tile that has arrived. count == 0: the share is done.
struct FetchedTile {
  const unsigned char* stage;  // keys, then values
  int count;
  int relative;  // see Tile
};

template <typename Shape>
class TileRing {
  static_assert(Shape::kStages <= 4, "TileSource::in_flight");

 public:
  // `source` is visible to all threads of the CTA.
  __device__ __forceinline__ TileRing(const Share& share, int page_size, unsigned char* stages,
                                      TileSource* source)
      : cursor_(share, page_size),
        source_(source),
        stages_(stages),
        next_id_(share.page <= share.last_page ? source->table_row[share.page] : 0) {
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) fetch();
  }

  // Waits for the oldest tile not yet taken, gives the stage freed by the tile before it to the
  // next fetch, and returns the oldest tile. Every thread of the CTA calls it until the share is
  // done; it also separates what they did with the previous tile from what they do next.
  __device__ __forceinline__ FetchedTile take() {
    copy_async_wait<Shape::kStages - 2>();
    __syncthreads();  // everyone's copies have landed, and everyone is done with the previous tile
    const FetchedTile tile = {stages_ + taken_ * Shape::kStageBytes,
                              source_->in_flight[taken_].count,
                              source_->in_flight[taken_].relative};
    taken_ = taken_ + 1 == Shape::kStages ? 0 : taken_ + 1;
    fetch();
    return tile;
  }

  // Before the stages' memory is used for anything else, or the CTA ends.
  __device__ __forceinline__ void drain() {
    copy_async_wait<0>();
    __syncthreads();
  }

 private:
  __device__ __forceinline__ void fetch() {
    const Tile tile = cursor_.next();
    if (threadIdx.x == 0) source_->in_flight[filling_] = tile;
    if (tile.count > 0) {
      const unsigned char* key;
      const unsigned char* value;
      int64_t stride;
      if (tile.page >= 0) {
        if (tile.page != page_) {
          page_ = tile.page;
          id_ = next_id_;
          // Looked up one page ahead, so that no copy waits for the table.
          next_id_ = page_ < source_->last_page ? source_->table_row[page_ + 1] : 0;
        }
        key =
            source_->tiles + id_ * source_->page_bytes + int64_t{tile.offset} * Shape::kTokenBytes;
        value = key + source_->value_offset;
        stride = Shape::kTokenBytes;
      } else {
        stride = source_->fresh_stride;
        key = source_->fresh_key + tile.relative * stride;
        value = source_->fresh_value + tile.relative * stride;
      }
      copy(key, value, stride, tile.count);
    }
    copy_async_commit();
    filling_ = filling_ + 1 == Shape::kStages ? 0 : filling_ + 1;
  }

  // Slots at or beyond `count` are neither read nor written.
  __device__ __forceinline__ void copy(const unsigned char* key, const unsigned char* value,
                                       int64_t stride, int count) {
    unsigned char* const stage = stages_ + filling_ * Shape::kStageBytes;
#pragma unroll 1  // the copies do not wait for each other in any case
    for (int i = static_cast<int>(threadIdx.x); i < count * Shape::kPieces; i += kAttendThreads) {
      const int token = i / Shape::kPieces, piece = i % Shape::kPieces;
      unsigned char* to = stage + token * Shape::kTokenStride + piece * 16;
      copy_async_16(to, key + token * stride + piece * 16);
      copy_async_16(to + Shape::kTokens * Shape::kTokenStride, value + token * stride + piece * 16);
    }
  }

  TileCursor<Shape::kTokens> cursor_;
  TileSource* source_;
  unsigned char* stages_;
  int page_ = -1;
  int32_t id_ = 0, next_id_;
  int filling_ = 0, taken_ = 0;
};

}  // namespace directkv::cuda

// What the copy engine of an SM is told about the cache: a tensor map over all tiles.
//
// Tiles are stored plainly (page_layout.h: token-major rows), and ldmatrix over plain rows of 128
// bytes or a multiple meets 8-way bank conflicts. The copy engine rearranges on the way: rows are
// cut into spans of 128 bytes, a span of all tokens of a tile is contiguous in shared memory, and
// the 16-byte pieces within it are swizzled, so that a piece of 8 consecutive tokens lies in 8
// different groups of banks. Measured against storing the tiles swizzled and copying them whole:
// the same bandwidth, on the link and from HBM (docs/performance.md).
//
// Other rows (head dims 80 and 96) stay as they are, one span, and are copied as one run without a
// map: they conflict 2-way or 4-way, and shorter spans would be read as requests of their size.
#pragma once

#include "../page_layout.h"
#include "device.cuh"

#if !defined(DIRECTKV_EMULATE_CUDA)
#include <cuda.h>
#endif

namespace directkv::cuda {

constexpr int kSwizzledBytes = 128;  // a span of this length is swizzled

constexpr int span_bytes(int row_bytes) {
  return row_bytes % kSwizzledBytes == 0 ? kSwizzledBytes : row_bytes;
}

// One copy through the map brings `tokens` rows of `spans` spans.
struct CopyBox {
  int tokens;
  int spans;
};

#if !defined(DIRECTKV_EMULATE_CUDA)

using TileMap = CUtensorMap;
using BoxMap = CUtensorMap;

// Ahead of the first copy, which would wait for the map otherwise.
__device__ __forceinline__ void prefetch_map(const TileMap* map) {
#if DIRECTKV_BULK_COPIES
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#else
  (void)map;
#endif
}

#if DIRECTKV_BULK_COPIES
// Copies a run of bytes, a multiple of 16; completes on the barrier.
__device__ __forceinline__ void copy_run(void* shared, const void* global, int bytes,
                                         Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Copies the box at (0, x, y, z) of a map; completes on the barrier.
__device__ __forceinline__ void copy_from_map(void* shared, const CUtensorMap* map, int x, int y,
                                              int z, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(shared)),
      "l"(map), "r"(0), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// Copies the box of a BoxMap that begins at elements (x, y, z); completes on the barrier.
__device__ __forceinline__ void copy_box_at(void* shared, const CUtensorMap* map, int x, int y,
                                            int z, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

// Copies tokens [row, row + box.tokens) of tile `tile`, starting with span `span`; completes on the
// barrier. Rows 0 to page_size - 1 of a tile are its keys, the next page_size its values.
__device__ __forceinline__ void copy_box(void* shared, const TileMap* map, int row, int tile,
                                         int span, Barrier* barrier) {
  copy_from_map(shared, map, row, tile, span, barrier);
}
#endif

#else

using BoxMap = emulation::BoxMap;
using TileMap = emulation::TileMap;
using emulation::copy_box;
using emulation::copy_box_at;
using emulation::copy_run;
inline void prefetch_map(const TileMap*) {}

#endif

// Copies kTokens new tokens of one KV head, from `token` on, keys or values; completes on the
// barrier. `span`: the head's first span among those of a token. Tokens beyond the last are zeros.
#if defined(DIRECTKV_EMULATE_CUDA)
using TokenMap = emulation::TokenMap;
using emulation::copy_tokens;
#else
using TokenMap = CUtensorMap;
#if DIRECTKV_BULK_COPIES
__device__ __forceinline__ void copy_tokens(void* shared, const TokenMap* map, int token, int span,
                                            int row, Barrier* barrier) {
  copy_from_map(shared, map, token, span, row, barrier);
}
#endif
#endif

// The map of a cache of `tiles` tiles (L * P * K) at `pages`, in host or device memory.
cudaError_t make_tile_map(TileMap* map, const PageLayout& layout, const void* pages, int64_t tiles,
                          const CopyBox& box);

// The map of new tokens [B, T, K, H], of which a copy brings `box_tokens` of one head.
cudaError_t make_token_map(TokenMap* map, const PageLayout& layout, const void* tokens, int batch,
                           int count, int box_tokens);

// Three sizes, the innermost first.
struct Extent3 {
  int x, y, z;
};

// The map of an array [z, y, x] of 16-bit elements, of which a copy brings a box, with zeros beyond
// the edges. x is a multiple of 8. A line of a box is of 32, 64 or 128 bytes, and swizzled: its
// 16-byte pieces change places, so that those of 8 lines lie in 8 different groups of banks.
cudaError_t make_box_map(BoxMap* map, const void* array, const Extent3& size, const Extent3& box);

}  // namespace directkv::cuda

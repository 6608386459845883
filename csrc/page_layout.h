// How one page of the KV cache is laid out in memory: the only place that knows.
//
// A cache is `pages[L, P, K, E]`. One tile (the innermost E elements) holds the keys and
// the values of one KV head for `page_size` consecutive tokens, keys first:
//
//   element  0 ............ page_size*H   key rows,   token-major, H elements each
//            page_size*H .. 2*page_size*H value rows, token-major, H elements each
//
// so one tile is one contiguous run that a copy engine, or a warp, fetches at full link speed.
// The order inside the tile is private to this header and to `directkv_jax/_layout.py`. It is plain
// because that costs nothing: storing the pieces of a row swizzled, for matrix instructions without
// bank conflicts, was measured against swizzling on the way, and both reach the peak of the link
// and of device memory (docs/performance.md).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DIRECTKV_HD __host__ __device__ __forceinline__
#else
#define DIRECTKV_HD inline
#endif

namespace directkv {

enum class DType : int { kBF16 = 0, kF16 = 1, kF32 = 2 };

DIRECTKV_HD int itemsize(DType t) { return t == DType::kF32 ? 4 : 2; }

struct PageLayout {
  DType dtype;
  int page_size;  // tokens per page; a multiple of 16
  int kv_heads;   // K
  int head_dim;   // H; a multiple of 8

  DIRECTKV_HD int64_t tile_elements() const { return int64_t{2} * page_size * head_dim; }
  DIRECTKV_HD int64_t tile_bytes() const { return tile_elements() * itemsize(dtype); }
  DIRECTKV_HD int64_t page_bytes() const { return tile_bytes() * kv_heads; }

  // Element offsets from the start of a tile.
  DIRECTKV_HD int64_t key_row(int token) const { return int64_t{token} * head_dim; }
  DIRECTKV_HD int64_t value_row(int token) const { return int64_t{page_size + token} * head_dim; }

  // Byte offset of a tile from the start of the cache. 64-bit: a 64 GiB pool has 3.4e10 elements.
  DIRECTKV_HD int64_t tile_offset(int64_t layer, int64_t num_pages, int64_t page, int head) const {
    return ((layer * num_pages + page) * kv_heads + head) * tile_bytes();
  }
};

}  // namespace directkv

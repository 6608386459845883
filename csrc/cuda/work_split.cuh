// Which tokens one CTA attends to, decided on the device from lengths and window.
//
// A CTA works for one batch row, one KV head, one block of query rows and one split. The query rows
// of a KV head are numbered t * G + g, so a block holds consecutive new tokens and can skip the
// pages left of its first query's window. The pages that remain are dealt to the splits in equal
// contiguous shares; the last split takes the fresh tokens too.
//
//   cached positions   0 ....... first ........................ length | fresh 0 .. T-1
//   splits                         [  0  )[  1  )[  2  )[   last       )[   last     )
#pragma once

#include "../params.h"
#include "device.cuh"

namespace directkv::cuda {

// Consecutive tokens that lie in one page, or fresh ones.
struct Tile {
  int count;     // 0: there is no further tile
  int relative;  // first token's position minus the row's length: fresh tokens have 0 and more
  int page;      // index into the row of the page table; -1: fresh
  int offset;    // first token's slot in its page; not used where fresh
};

struct PageRange {
  int begin, end;
};

// The tokens of a CTA, positions relative to the row's length.
struct Share {
  int page, last_page;          // pages [page, last_page]; page > last_page: no cached tokens
  int offset;                   // slot of the first token in `page`
  int first, last;              // cached: [first, last), last <= 0
  int fresh_first, fresh_last;  // fresh: [fresh_first, fresh_last)

  __device__ __forceinline__ bool empty() const {
    return first >= last && fresh_first >= fresh_last;
  }
};

__device__ __forceinline__ int64_t capacity(const CacheView& cache) {
  return int64_t{cache.max_pages} * cache.layout.page_size;
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

// Share `split` of `splits` of the pages that hold positions [first, length).
__device__ __forceinline__ PageRange page_share(int64_t first, int64_t length, int page_size,
                                                int split, int splits) {
  if (first >= length) return {0, 0};
  const int64_t begin = first / page_size, count = (length - 1) / page_size + 1 - begin;
  return {static_cast<int>(begin + count * split / splits),
          static_cast<int>(begin + count * (split + 1) / splits)};
}

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

// The tokens of `pages` and, in the last split, the fresh ones that queries [t_first, t_last] see.
__device__ __forceinline__ Share make_share(const AttendParams& p, PageRange pages, int64_t length,
                                            int seq, int t_first, int t_last, bool last_split) {
  Share share = {0, -1, 0, 0, 0, 0, 0};
  if (pages.begin < pages.end) {
    const int64_t page_size = p.cache.layout.page_size;
    const int64_t first = first_seen(length, t_first, p.window_left);
    const int64_t begin = max(pages.begin * page_size, first);
    share.page = pages.begin;
    share.last_page = pages.end - 1;
    share.offset = static_cast<int>(begin - pages.begin * page_size);
    share.first = static_cast<int>(begin - length);
    share.last = static_cast<int>(min(pages.end * page_size, length) - length);
  }
  if (last_split && p.fresh_tokens > 0) {
    share.fresh_first = p.window_left >= 0 && t_first > p.window_left ? t_first - p.window_left : 0;
    share.fresh_last = min(t_last + 1, seq);
  }
  return share;
}

// Walks a share in tiles of at most kTokens tokens; no tile crosses a page.
template <int kTokens>
class TileCursor {
 public:
  __device__ __forceinline__ TileCursor(const Share& share, int page_size)
      : last_(share.last),
        fresh_first_(share.fresh_first),
        fresh_last_(share.fresh_last),
        page_size_(page_size),
        page_(share.page) {
    // Tiles start at multiples of kTokens in their page: slots left of the window are masked later.
    offset_ = share.offset / kTokens * kTokens;
    relative_ = share.first - (share.offset - offset_);
    if (share.first >= share.last) start_fresh();
  }

  __device__ __forceinline__ Tile next() {
    Tile tile = {0, relative_, page_, offset_};
    if (page_ >= 0) {
      tile.count = min(min(kTokens, page_size_ - offset_), last_ - relative_);
      relative_ += min(kTokens, page_size_ - offset_);
      offset_ += kTokens;
      if (offset_ >= page_size_) {
        offset_ = 0;
        ++page_;
      }
      if (relative_ >= last_) start_fresh();
    } else if (relative_ < fresh_last_) {
      tile.count = min(kTokens, fresh_last_ - relative_);
      relative_ += tile.count;
    }
    return tile;
  }

 private:
  __device__ __forceinline__ void start_fresh() {
    page_ = -1;
    relative_ = fresh_first_;
  }

  int last_, fresh_first_, fresh_last_, page_size_;
  int page_;      // -1: the cached tokens are done
  int offset_;    // slot in the page
  int relative_;  // position minus length
};

}  // namespace directkv::cuda

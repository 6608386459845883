// Which rows of a call can be served at all: everything a request can get wrong at run time.
#pragma once

#include "../params.h"

namespace directkv::cpu {

inline int64_t row_capacity(const CacheView& cache) {
  return int64_t{cache.max_pages} * cache.layout.page_size;
}

inline bool layer_in_range(const CacheView& cache) {
  return *cache.layer >= 0 && *cache.layer < cache.num_layers;
}

// Are the pages that hold positions [begin, end) of row b all inside the pool?
inline bool pages_in_range(const CacheView& cache, int b, int64_t begin, int64_t end) {
  if (begin >= end) return true;
  const int32_t* table = cache.page_table + int64_t{b} * cache.max_pages;
  const int64_t last = (end - 1) / cache.layout.page_size;
  for (int64_t i = begin / cache.layout.page_size; i <= last; ++i) {
    if (table[i] < 0 || table[i] >= cache.num_pages) return false;
  }
  return true;
}

}  // namespace directkv::cpu

// append: new keys and values into the pages, a row at a time all or none.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "parallel.h"
#include "row_check.h"

namespace directkv::cpu {
namespace {

constexpr int64_t kChunkTokens = 32;
// Below this the caller alone is done before a helper has woken.
constexpr int64_t kSerialBytes = 256 * 1024;

bool fits(const AppendParams& p, int b) {
  const int64_t length = p.cache.lengths[b], seq = p.seq_lengths[b];
  return seq > 0 && seq <= p.new_tokens && length >= 0 && length + seq <= row_capacity(p.cache) &&
         layer_in_range(p.cache) && pages_in_range(p.cache, b, length, length + seq);
}

void append_token(const AppendParams& p, int b, int64_t t) {
  const CacheView& cache = p.cache;
  const PageLayout& layout = cache.layout;
  const int64_t element = itemsize(layout.dtype), row_bytes = layout.head_dim * element;
  const int64_t position = cache.lengths[b] + t;
  const int64_t page = cache.page_table[int64_t{b} * cache.max_pages + position / layout.page_size];
  const int slot = static_cast<int>(position % layout.page_size);
  char* tile =
      static_cast<char*>(cache.pages) + layout.tile_offset(*cache.layer, cache.num_pages, page, 0);
  const int64_t from = (int64_t{b} * p.new_tokens + t) * layout.kv_heads * row_bytes;
  const char* key = static_cast<const char*>(p.key) + from;
  const char* value = static_cast<const char*>(p.value) + from;
  for (int k = 0; k < layout.kv_heads; ++k) {
    std::memcpy(tile + layout.key_row(slot) * element, key, row_bytes);
    std::memcpy(tile + layout.value_row(slot) * element, value, row_bytes);
    tile += layout.tile_bytes();
    key += row_bytes;
    value += row_bytes;
  }
}

}  // namespace

void append(const AppendParams& p, const Executor& executor) {
  if (p.cache.batch <= 0 || p.new_tokens <= 0) return;
  // Decided before anything is written, so that no chunk depends on another.
  std::vector<char> ok(p.cache.batch);
  for (int b = 0; b < p.cache.batch; ++b) ok[b] = fits(p, b);

  const PageLayout& layout = p.cache.layout;
  const int64_t per_row = (p.new_tokens + kChunkTokens - 1) / kChunkTokens;
  const int64_t bytes = int64_t{2} * p.cache.batch * p.new_tokens * layout.kv_heads *
                        layout.head_dim * itemsize(layout.dtype);
  parallel_chunks(p.cache.batch * per_row, bytes < kSerialBytes ? Executor{} : executor,
                  [&](int64_t chunk, int) {
                    const int b = static_cast<int>(chunk / per_row);
                    if (!ok[b]) return;
                    const int64_t begin = chunk % per_row * kChunkTokens;
                    const int64_t end = std::min<int64_t>(begin + kChunkTokens, p.seq_lengths[b]);
                    for (int64_t t = begin; t < end; ++t) append_token(p, b, t);
                  });
}

}  // namespace directkv::cpu

// Whole pages between the cache [L, P, K, E] and a dense buffer [n, L, K, E].
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace directkv::cpu {
namespace {

template <bool kRead>
void copy_pages(const PageCopyParams& p, const Executor& executor) {
  const int64_t bytes = p.layout.page_bytes();
  parallel_chunks(p.count * p.num_layers, executor, [&](int64_t chunk, int) {
    const int64_t layer = chunk % p.num_layers, page = p.page_ids[chunk / p.num_layers];
    char* buffer = static_cast<char*>(p.buffer) + chunk * bytes;
    const bool in_pool = page >= 0 && page < p.num_pages;
    if (!in_pool) {
      if (kRead) std::memset(buffer, 0, bytes);
      return;
    }
    char* tile = static_cast<char*>(p.pages) + p.layout.tile_offset(layer, p.num_pages, page, 0);
    std::memcpy(kRead ? buffer : tile, kRead ? tile : buffer, bytes);
  });
}

}  // namespace

void read_pages(const PageCopyParams& params, const Executor& executor) {
  copy_pages<true>(params, executor);
}

void write_pages(const PageCopyParams& params, const Executor& executor) {
  copy_pages<false>(params, executor);
}

}  // namespace directkv::cpu

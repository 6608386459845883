// append: the new tokens of every row into their pages, all of a row's or none.
#include <algorithm>

#include "device.cuh"
#include "kernels.h"
#include "units.cuh"

namespace directkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPiecesPerThread = 4;  // what sizes the grid; a thread may take more

// blocks_per_row CTAs share a row. Each decides by itself, from the same unchanging inputs, whether
// the row is written, so none has to wait for another.
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ AppendParams p, int blocks_per_row) {
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const CacheView& cache = p.cache;
  const PageLayout& layout = cache.layout;
  const int b = static_cast<int>(blockIdx.x / blocks_per_row);
  // All loads before the first look at one: they come in one round trip.
  const int64_t length = cache.lengths[b];
  const int seq = p.seq_lengths[b], layer = *cache.layer;

  // 16-byte pieces in the order [K, key or value, token, piece]: neighbours in the source within a
  // token, neighbours in the page from token to token.
  const int pieces = layout.head_dim * itemsize(layout.dtype) / 16;
  const int per_part = p.new_tokens * pieces, parts = 2 * layout.kv_heads;
  const int stride = blocks_per_row * kThreads;
  int i = static_cast<int>(blockIdx.x % blocks_per_row) * kThreads + static_cast<int>(threadIdx.x);
  struct Piece {
    int head, token, piece;
    bool is_value;
    uint4 data;
  };
  const auto load = [&](int at) {
    const int part = at / per_part, in_part = at - part * per_part;
    Piece x;
    x.token = in_part / pieces;
    x.piece = in_part - x.token * pieces;
    x.head = part / 2;
    x.is_value = part % 2 != 0;
    const int64_t from =
        ((int64_t{b} * p.new_tokens + x.token) * layout.kv_heads + x.head) * pieces + x.piece;
    x.data = static_cast<const uint4*>(x.is_value ? p.value : p.key)[from];
    return x;
  };
  Piece x = {};
  if (i < parts * per_part) x = load(i);

  if (seq <= 0 || seq > p.new_tokens || length < 0 || length + seq > capacity(cache) ||
      !layer_in_range(cache, layer)) {
    return;
  }
  const int32_t* table_row = cache.page_table + int64_t{b} * cache.max_pages;
  const PageRange pages = {static_cast<int>(length / layout.page_size),
                           static_cast<int>((length + seq - 1) / layout.page_size) + 1};
  if (__syncthreads_or(any_bad_page(table_row, pages, cache.num_pages))) return;

  unsigned char* const tiles =
      static_cast<unsigned char*>(cache.pages) + layout.tile_offset(layer, cache.num_pages, 0, 0);
  while (i < parts * per_part) {
    if (x.token < seq) {
      const int64_t position = length + x.token;
      const int64_t page = table_row[position / layout.page_size];
      const int slot = static_cast<int>(position % layout.page_size);
      const int64_t element = x.is_value ? layout.value_row(slot) : layout.key_row(slot);
      unsigned char* const to = tiles + (page * layout.kv_heads + x.head) * layout.tile_bytes() +
                                element * itemsize(layout.dtype) + x.piece * 16;
      *reinterpret_cast<uint4*>(to) = x.data;
    }
    i += stride;
    if (i < parts * per_part) x = load(i);
  }
}

}  // namespace

cudaError_t append(const AppendParams& p, cudaStream_t stream) {
  const PageLayout& layout = p.cache.layout;
  if (p.cache.batch == 0 || p.new_tokens == 0) return cudaSuccess;
  if (layout.page_size <= 0 || layout.kv_heads <= 0 || layout.head_dim <= 0 ||
      layout.head_dim % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t pieces =
      int64_t{2} * layout.kv_heads * p.new_tokens * layout.head_dim * itemsize(layout.dtype) / 16;
  if (pieces > INT32_MAX / 2) return cudaErrorInvalidConfiguration;  // of one row
  // Few blocks saturate a link; many rows bring their own.
  constexpr int64_t kMaxBlocksPerRow = 128;
  const int64_t blocks_per_row = std::clamp<int64_t>(
      (pieces + kThreads * kPiecesPerThread - 1) / (kThreads * kPiecesPerThread), 1,
      kMaxBlocksPerRow);
  return launch(append_kernel, {p.cache.batch * blocks_per_row, kThreads}, stream, p,
                static_cast<int>(blocks_per_row));
}

}  // namespace directkv::cuda

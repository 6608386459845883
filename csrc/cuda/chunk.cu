// attend for many new tokens: the launches of the chunk kernel, see chunk_plan.h.
#include "chunk.h"
#include "chunk_kernel.cuh"

namespace directkv::cuda {
namespace {

template <DType kDType, int kHeadDim>
cudaError_t launch_chunk(const AttendParams& p, const ChunkGrid& grid, cudaStream_t stream) {
  using Shape = ChunkShape<kDType, kHeadDim>;
  ChunkMaps maps = {};
  const PageLayout& layout = p.cache.layout;
  const CopyBox box = {grid.box_tokens, grid.box_tokens == Shape::kTokens ? Shape::kSpans : 1};
  const int64_t stored = grid.slot ? int64_t{p.cache.batch} * grid.slot_row_pages
                                   : p.cache.num_layers * p.cache.num_pages;
  if (grid.range_begin < grid.range_end) {
    const void* const pages = grid.slot ? grid.slot : p.cache.pages;
    const cudaError_t status =
        make_tile_map(&maps.pages, layout, pages, stored * layout.kv_heads, box);
    if (status != cudaSuccess) return status;
  }
  if (grid.fresh && p.fresh_tokens > 0) {
    for (const auto& [map, tokens] : {std::pair{&maps.key, p.key}, {&maps.value, p.value}}) {
      const cudaError_t status =
          make_token_map(map, layout, tokens, p.cache.batch, p.fresh_tokens, Shape::kTokens);
      if (status != cudaSuccess) return status;
    }
  }
  const int64_t units = int64_t{p.cache.batch} * layout.kv_heads * grid.row_blocks;
  const LaunchShape shape = {units + grid.copy_ctas, kChunkThreads,
                             static_cast<size_t>(Shape::kSharedBytes)};
  return launch(chunk_kernel<kDType, kHeadDim>, shape, stream, p, grid, maps);
}

using LaunchChunk = cudaError_t (*)(const AttendParams&, const ChunkGrid&, cudaStream_t);

template <DType kDType>
LaunchChunk find_head_dim(int head_dim) {
  switch (head_dim) {
    case 64: return &launch_chunk<kDType, 64>;
    case 128: return &launch_chunk<kDType, 128>;
    case 256: return &launch_chunk<kDType, 256>;
    default: return nullptr;
  }
}

}  // namespace

cudaError_t attend_chunk(const AttendParams& p, const ChunkPlan& plan, const DeviceLimits& limits,
                         cudaStream_t stream) {
  const PageLayout& layout = p.cache.layout;
  const LaunchChunk launch_one = layout.dtype == DType::kBF16
                                     ? find_head_dim<DType::kBF16>(layout.head_dim)
                                     : find_head_dim<DType::kF16>(layout.head_dim);
  if (!launch_one) return cudaErrorInvalidValue;
  ChunkGrid grid = {};
  grid.tokens_per_block = plan.tokens_per_block;
  grid.row_blocks = plan.row_blocks;
  grid.box_tokens = box_tokens(layout.page_size, chunk_tile_tokens(layout.head_dim));
  grid.inverse_group = 1.0f * layout.kv_heads / p.query_heads;
  grid.first = grid.fresh = true;
  if (!p.pages_on_host || p.cache.num_pages == 0) {
    grid.range_end = p.cache.num_pages > 0 ? kMaxLength : 0;
    grid.last = true;
    return launch_one(p, grid, stream);
  }
  const int capacity = plan.ranges * plan.range_tokens;
  auto* const workspace = static_cast<unsigned char*>(p.workspace);
  unsigned char* const slots[2] = {workspace, workspace + plan.slot_bytes};
  grid.states = reinterpret_cast<float*>(workspace + 2 * plan.slot_bytes);
  grid.slot_row_pages = plan.range_tokens / layout.page_size;
  for (int i = 0; i <= plan.ranges; ++i) {
    grid.last = i == plan.ranges;
    grid.copy_ctas = grid.last ? 0 : choose_copy_ctas(limits.coherent_link);
    grid.copy_begin = i * plan.range_tokens;
    grid.copy_end = std::min(capacity, grid.copy_begin + plan.range_tokens);
    grid.copy_to = slots[i % 2];
    if (const auto status = launch_one(p, grid, stream); status != cudaSuccess) return status;
    grid.first = grid.fresh = false;
    grid.range_begin = grid.copy_begin;
    grid.range_end = grid.copy_end;
    grid.slot = slots[i % 2];
  }
  return cudaSuccess;
}

}  // namespace directkv::cuda

// attend: picks the instance for dtype and head dim, then merges what was cut between its CTAs.
#include <cstdint>

#include "attend_instances.h"
#include "chunk.h"
#include "kernels.h"
#include "merge.cuh"

namespace directkv::cuda {

DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kBF16)
DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kF16)
DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kF32)

namespace {

using LaunchAttend = cudaError_t (*)(const AttendParams&, const AttendPlan&, const DeviceLimits&,
                                     AttendGrid*, cudaStream_t);

template <DType kDType>
LaunchAttend find_head_dim(int head_dim) {
#define DIRECTKV_CASE(dtype, head_dim_) \
  case head_dim_: return &launch_attend<dtype, head_dim_>;
  switch (head_dim) {
    DIRECTKV_HEAD_DIMS(DIRECTKV_CASE, kDType)
    default: return nullptr;
  }
#undef DIRECTKV_CASE
}

LaunchAttend find_attend(DType dtype, int head_dim) {
  switch (dtype) {
    case DType::kBF16: return find_head_dim<DType::kBF16>(head_dim);
    case DType::kF16: return find_head_dim<DType::kF16>(head_dim);
    case DType::kF32: return find_head_dim<DType::kF32>(head_dim);
  }
  return nullptr;
}

cudaError_t launch_merge(const AttendParams& p, const AttendGrid& grid, cudaStream_t stream) {
  const int64_t units = int64_t{p.cache.batch} * p.cache.layout.kv_heads * grid.row_blocks;
  const int64_t blocks = units * merge_ctas_per_unit(grid);
  switch (p.cache.layout.dtype) {
    case DType::kBF16:
      return launch(merge_kernel<DType::kBF16>, {blocks, kMergeThreads}, stream, p, grid);
    case DType::kF16:
      return launch(merge_kernel<DType::kF16>, {blocks, kMergeThreads}, stream, p, grid);
    case DType::kF32:
      return launch(merge_kernel<DType::kF32>, {blocks, kMergeThreads}, stream, p, grid);
  }
  return cudaErrorInvalidValue;
}

// Shared memory for the queries of 128 rows of head dim 256 and a ring.
constexpr int kWideShared = 160 * 1024;

// The kernels count work in int32.
bool too_much_work(const AttendParams& p, const AttendPlan& plan, int tile) {
  const int64_t work = int64_t{p.cache.batch} * p.cache.layout.kv_heads * plan.row_blocks *
                       (int64_t{p.cache.max_pages} * p.cache.layout.page_size / tile +
                        p.fresh_tokens / tile + 2 + kUnitCost);
  return work > INT32_MAX;
}

#if DIRECTKV_SM90A
// More query rows than one CTA holds, where the GPU has what the chunk kernel needs. In device
// memory only if its CTAs, one for every 128 query rows, fill half of the GPU: they do not share a
// row.
bool use_chunks(const AttendParams& p, const ChunkPlan& plan, const DeviceLimits& limits) {
  if (!plan.used || !limits.warpgroups) return false;
  const int64_t units = int64_t{p.cache.batch} * p.cache.layout.kv_heads * plan.row_blocks;
  return p.pages_on_host || 2 * units >= limits.sm_count;
}
#endif

}  // namespace

bool attend_supported(DType dtype, int head_dim) { return find_attend(dtype, head_dim) != nullptr; }

cudaError_t attend(const AttendParams& p, cudaStream_t stream) {
  const PageLayout& layout = p.cache.layout;
  if (p.cache.batch == 0 || p.query_tokens == 0) return cudaSuccess;
  const LaunchAttend launch_partial = find_attend(layout.dtype, layout.head_dim);
  if (!launch_partial || layout.page_size <= 0 || layout.page_size % 16 != 0 ||
      layout.kv_heads <= 0 || p.query_heads <= 0 || p.query_heads % layout.kv_heads != 0 ||
      (p.fresh_tokens != 0 && p.fresh_tokens != p.query_tokens)) {
    return cudaErrorInvalidValue;
  }
  // Tiles of the cache are numbered in int32.
  if (p.cache.num_layers * p.cache.num_pages * layout.kv_heads > INT32_MAX)
    return cudaErrorInvalidConfiguration;
  const int item = itemsize(layout.dtype), tile = tile_tokens(item, layout.head_dim);
  const DeviceLimits& limits = device_limits();
#if DIRECTKV_SM90A
  const ChunkPlan chunk = make_chunk_plan(
      item, p.cache.batch, p.query_tokens, p.query_heads, layout.kv_heads, layout.head_dim,
      layout.page_size, p.cache.max_pages,
      p.ring_slot_bytes > 0 ? std::min(p.ring_slot_bytes, kRingSlotBytes) : kRingSlotBytes);
  if (use_chunks(p, chunk, limits)) return attend_chunk(p, chunk, limits, stream);
#endif
  const bool wide = p.pages_on_host && limits.shared_per_block >= kWideShared;
  const AttendPlan plan =
      make_attend_plan(item, p.cache.batch, p.query_tokens, p.query_heads, layout.kv_heads,
                       layout.head_dim, int64_t{p.cache.max_pages} * layout.page_size, wide);
  if (plan.rows_per_block > max_rows(item, layout.head_dim)) return cudaErrorInvalidValue;
  if (too_much_work(p, plan, tile)) return cudaErrorInvalidConfiguration;
  AttendGrid grid = {};
  grid.tokens_per_block = plan.tokens_per_block;
  grid.rows_per_block = plan.rows_per_block;
  grid.row_blocks = plan.row_blocks;
  while (grid.tile_tokens() < tile) ++grid.tile_shift;
  // To start a CTA costs more than its second tile would, unless it starts while a projection runs.
  grid.least_tiles = p.projected ? 1 : 2;
  grid.inverse_group = 1.0f / static_cast<float>(p.query_heads / layout.kv_heads);
  grid.box_tokens = box_tokens(layout.page_size, tile);
  const cudaError_t status = launch_partial(p, plan, limits, &grid, stream);
  return status != cudaSuccess ? status : launch_merge(p, grid, stream);
}

}  // namespace directkv::cuda

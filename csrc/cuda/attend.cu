// attend: picks the instance for dtype and head dim, then merges its splits.
#include <algorithm>

#include "attend_instances.h"
#include "kernels.h"

namespace directkv::cuda {

DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kBF16)
DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kF16)
DIRECTKV_HEAD_DIMS(DIRECTKV_DECLARE_ATTEND, kF32)

namespace {

using LaunchAttend = cudaError_t (*)(const AttendParams&, const AttendGrid&, cudaStream_t);

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

cudaError_t launch_merge(const AttendParams& p, int splits, cudaStream_t stream) {
  const int64_t queries = int64_t{p.cache.batch} * p.query_tokens * p.query_heads;
  switch (p.cache.layout.dtype) {
    case DType::kBF16:
      return launch(merge_kernel<DType::kBF16>, queries, kMergeThreads, 0, stream, p, splits);
    case DType::kF16:
      return launch(merge_kernel<DType::kF16>, queries, kMergeThreads, 0, stream, p, splits);
    case DType::kF32:
      return launch(merge_kernel<DType::kF32>, queries, kMergeThreads, 0, stream, p, splits);
  }
  return cudaErrorInvalidValue;
}

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
  const AttendPlan plan = make_attend_plan(p.cache.batch, p.query_tokens, p.query_heads,
                                           layout.kv_heads, p.cache.max_pages);
  // The workspace depends on the splits alone, so a head dim with less room takes smaller blocks.
  const int rows = p.query_tokens * (p.query_heads / layout.kv_heads);
  AttendGrid grid;
  grid.rows_per_block = std::min(plan.rows_per_block, max_rows(layout.head_dim));
  grid.row_blocks = (rows + grid.rows_per_block - 1) / grid.rows_per_block;
  grid.splits = plan.splits;
  const cudaError_t status = launch_partial(p, grid, stream);
  return status != cudaSuccess ? status : launch_merge(p, grid.splits, stream);
}

}  // namespace directkv::cuda

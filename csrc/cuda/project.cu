// project: picks the instance for dtype and rows.
#include <cstdint>

#include "kernels.h"
#include "project_kernel.cuh"
#include "project_plan.h"

namespace directkv::cuda {
namespace {

template <DType kDType, int kRowTiles>
cudaError_t launch_project(const ProjectParams& p, cudaStream_t stream) {
  const int heads = p.kv_heads * (p.group + 2);
  const int shares = kProjectWarps / project_column_warps(p.head_dim);
  const int chunks = (p.width + kProjectChunk - 1) / kProjectChunk;
  int ctas = 1;
  if (device_limits().bulk_copies) {
    ctas = p.ctas_per_head > 0
               ? p.ctas_per_head
               : choose_ctas_per_head(heads, shares, chunks,
                                      device_limits().sm_count * project_ctas_per_sm(kRowTiles));
  }
  const int64_t floats = int64_t{shares * kRowTiles * 16 + kProjectWarps} * p.head_dim;
  const LaunchShape shape = {int64_t{heads} * ctas, kProjectWarps * 32,
                             static_cast<size_t>(4 * floats), ctas, true};
  return launch(project_kernel<kDType, kRowTiles>, shape, stream, p, ctas);
}

template <DType kDType>
cudaError_t project_rows(const ProjectParams& p, cudaStream_t stream) {
  return p.rows <= 16 ? launch_project<kDType, 1>(p, stream) : launch_project<kDType, 2>(p, stream);
}

}  // namespace

cudaError_t project(const ProjectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  const int ctas = p.ctas_per_head;
  if (p.rows < 0 || p.rows > kMaxProjectRows || p.width <= 0 || p.width % 8 != 0 ||
      p.kv_heads <= 0 || p.group <= 0 || p.head_dim <= 0 || p.head_dim % 8 != 0 ||
      p.head_dim > 256 || p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim ||
      ctas < 0 || ctas > kMaxProjectCtas || (ctas & (ctas - 1)) != 0) {
    return cudaErrorInvalidValue;
  }
  switch (p.dtype) {
    case DType::kBF16: return project_rows<DType::kBF16>(p, stream);
    case DType::kF16: return project_rows<DType::kF16>(p, stream);
    case DType::kF32: break;
  }
  return cudaErrorInvalidValue;
}

}  // namespace directkv::cuda

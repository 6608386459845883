// project: picks the instance for dtype, rows and head dim.
#include <cstdint>

#include "kernels.h"
#include "project_kernel.cuh"

namespace directkv::cuda {
namespace {

cudaError_t make_maps(ProjectMaps* maps, const ProjectParams& p, int groups, int stage_rows) {
  const int heads = p.kv_heads * (p.group + 2);
  const cudaError_t status = make_box_map(&maps->weights, p.kernel, {p.head_dim, heads, p.width},
                                          {kProjectColumns, 1, stage_rows});
  if (status != cudaSuccess) return status;
  return make_box_map(&maps->x, p.x, {p.width, p.rows, 1}, {stage_rows, 8 * groups, 1});
}

template <typename Shape>
cudaError_t launch_project(const ProjectParams& p, cudaStream_t stream) {
  const int heads = p.kv_heads * (p.group + 2);
  int ctas = 1;
  ProjectMaps maps = {};
  if (device_limits().bulk_copies) {
    ctas = p.ctas_per_head > 0
               ? p.ctas_per_head
               : choose_ctas_per_head(heads, Shape::stages(p.width), device_limits().sm_count);
    const cudaError_t status = make_maps(&maps, p, Shape::kGroups, Shape::kRows);
    if (status != cudaSuccess) return status;
  }
  const int lines = (p.rows + ctas - 1) / ctas;
  const int sum_bytes = 4 * lines * ctas * Shape::kShares * p.head_dim;
  const LaunchShape shape = {int64_t{heads} * ctas, (kProjectWarps + 1) * 32,
                             static_cast<size_t>(Shape::kRingBytes + sum_bytes), ctas, true};
  return launch(project_kernel<Shape>, shape, stream, p, ctas, maps);
}

template <DType kDType, int kGroups>
cudaError_t project_heads(const ProjectParams& p, cudaStream_t stream) {
  switch (project_column_warps(p.head_dim)) {
    case 1: return launch_project<ProjectShape<kDType, kGroups, 1>>(p, stream);
    case 2: return launch_project<ProjectShape<kDType, kGroups, 2>>(p, stream);
    default: return launch_project<ProjectShape<kDType, kGroups, 4>>(p, stream);
  }
}

template <DType kDType>
cudaError_t project_rows(const ProjectParams& p, cudaStream_t stream) {
  return p.rows <= 8    ? project_heads<kDType, 1>(p, stream)
         : p.rows <= 16 ? project_heads<kDType, 2>(p, stream)
                        : project_heads<kDType, 4>(p, stream);
}

}  // namespace

cudaError_t project(const ProjectParams& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.rows < 0 || p.rows > kMaxProjectRows || p.width <= 0 || p.width % 8 != 0 ||
      p.kv_heads <= 0 || p.group <= 0 || p.head_dim <= 0 || p.head_dim % 8 != 0 ||
      p.head_dim > 256 || p.rotary_dim < 0 || p.rotary_dim % 2 != 0 || p.rotary_dim > p.head_dim ||
      p.ctas_per_head < 0 || p.ctas_per_head > kMaxProjectCtas || !p.projected) {
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

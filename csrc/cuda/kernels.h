// The CUDA kernels' launchers, callable from plain C++. They allocate nothing, synchronise nothing
// and launch the same kernels whatever the data, so that XLA can capture them in a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"

namespace directkv::cuda {

cudaError_t attend(const AttendParams& params, cudaStream_t stream);
// For rows up to kMaxProjectRows (project_plan.h). Starts when all earlier kernels have ended.
cudaError_t project(const ProjectParams& params, cudaStream_t stream);
cudaError_t append(const AppendParams& params, cudaStream_t stream);
cudaError_t read_pages(const PageCopyParams& params, cudaStream_t stream);
cudaError_t write_pages(const PageCopyParams& params, cudaStream_t stream);

// Whether an attend kernel exists for this dtype and head dim.
bool attend_supported(DType dtype, int head_dim);

}  // namespace directkv::cuda

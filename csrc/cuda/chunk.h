// attend for many new tokens, where the GPU has warpgroup matrix instructions (compute capability
// 9.0) and the build was made for it.
#pragma once

#include <cuda_runtime_api.h>

#include "../params.h"
#include "chunk_plan.h"
#include "device_limits.h"

namespace directkv::cuda {

// `plan.used`, and the limits allow it.
cudaError_t attend_chunk(const AttendParams& params, const ChunkPlan& plan,
                         const DeviceLimits& limits, cudaStream_t stream);

}  // namespace directkv::cuda

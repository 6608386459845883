// What the handlers of the CUDA kernels check beyond operands.h.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/chunk_plan.h"
#include "cuda/kernels.h"
#include "operands.h"

namespace directkv::handlers {

inline ffi::Error to_error(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("directkv: ") + call + ": " + cudaGetErrorString(status));
}

// The zero in zero-copy: a host cache must be read from host memory, not from a copy in HBM.
inline ffi::Error check_residence(const ffi::AnyBuffer& pages,
                                  const StorageAttributes& attributes) {
  cudaPointerAttributes at{};
  if (auto status = cudaPointerGetAttributes(&at, pages.untyped_data()); status != cudaSuccess) {
    cudaGetLastError();  // not sticky, and not ours to leave behind
    return to_error(status, "cudaPointerGetAttributes");
  }
  if (attributes.host) {
    DIRECTKV_CHECK(at.type == cudaMemoryTypeHost,
                   "a host cache arrived in memory that is not page-locked host memory: XLA copied "
                   "it. Pass the cache to the jitted function as an argument (one that is closed "
                   "over becomes a constant in device memory), donate it, and pass it whole, never "
                   "a slice of it.");
  } else {
    DIRECTKV_CHECK(at.type == cudaMemoryTypeDevice, "a device cache arrived outside device memory");
  }
  return ffi::Error::Success();
}

// There is a kernel, and a workspace for it.
inline ffi::Error prepare_attend(const ffi::AnyBuffer& workspace, AttendParams* params) {
  const PageLayout& layout = params->cache.layout;
  DIRECTKV_CHECK(cuda::attend_supported(layout.dtype, layout.head_dim),
                 "no CUDA kernel for head dim " + std::to_string(layout.head_dim));
  const int64_t needed =
      cuda::workspace_bytes(itemsize(layout.dtype), params->cache.batch, params->query_tokens,
                            params->query_heads, layout.kv_heads, layout.head_dim, layout.page_size,
                            params->cache.max_pages, params->pages_on_host);
  return set_workspace(workspace, needed, params);
}

}  // namespace directkv::handlers

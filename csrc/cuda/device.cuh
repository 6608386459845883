// The few machine operations the kernels use beyond C++: dynamic shared memory, asynchronous
// copies into it, and the launch. Under DIRECTKV_EMULATE_CUDA the same kernels are compiled by a
// host compiler and these come from tests/cpp/cuda_emulation.h.
#pragma once

#if defined(DIRECTKV_EMULATE_CUDA)
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

namespace directkv::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

#if !defined(DIRECTKV_EMULATE_CUDA)

__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(128) unsigned char storage[];
  return storage;
}

// Starts copying 16 bytes from global memory (device or mapped host) to shared memory, past L1.
// Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

// Closes this thread's group of copies (empty groups count too).
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's newest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The status is that of this launch alone: an older error of the process is not picked up.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
                   cudaStream_t stream, Args... args) {
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Above 48 KiB, the kernel's static share included, a launch must have asked for it.
  if (shared_bytes > 32 * 1024) {
    const cudaError_t status = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(shared_bytes));
    if (status != cudaSuccess) {
      cudaGetLastError();  // reported here, so not left pending
      return status;
    }
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

#endif

}  // namespace directkv::cuda

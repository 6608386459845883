// Runs the CUDA kernels on the CPU, one thread block at a time, so that their indexing, masks and
// barriers are tested where there is no GPU: threads are fibers that switch at barriers and
// shuffles. Forced in front of csrc/cuda/device.cuh by DIRECTKV_EMULATE_CUDA.
//
// What it finds: wrong results, accesses out of bounds (with -fsanitize=address), barriers that not
// all threads reach, a missing barrier or wait (threads run in either order between barriers, and
// asynchronous copies land at once or as late as they may). What it cannot find: misaligned vector
// accesses beyond what -fsanitize=alignment reports, and anything about speed.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __global__
#define __host__
#define __shared__ static  // one block runs at a time
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace directkv::emulation {

struct Options {
  bool reverse = false;     // last thread first
  bool late_copies = true;  // asynchronous copies land when they are waited for, not at once
};
Options& options();

void sync_block();
bool sync_block_or(bool predicate);
void sync_warp();
uint32_t shuffle_xor(uint32_t value, int mask);
unsigned char* dynamic_shared();
void copy_async_16(void* to, const void* from);
void copy_async_commit();
void copy_async_wait(int pending);
void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& body);

}  // namespace directkv::emulation

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

using std::max;
using std::min;
inline void __syncthreads() { directkv::emulation::sync_block(); }
inline int __syncthreads_or(int p) { return directkv::emulation::sync_block_or(p != 0); }
inline void __syncwarp() { directkv::emulation::sync_warp(); }
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  bits = directkv::emulation::shuffle_xor(bits, mask);
  std::memcpy(&x, &bits, 4);
  return x;
}

namespace directkv::cuda {

using emulation::copy_async_16;
using emulation::copy_async_commit;
using emulation::dynamic_shared;

template <int kPending>
void copy_async_wait() {
  emulation::copy_async_wait(kPending);
}

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), int64_t blocks, int threads, size_t shared_bytes,
                   cudaStream_t, Args... args) {
  emulation::run_grid(blocks, threads, shared_bytes, [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace directkv::cuda

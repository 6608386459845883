#include "kernels.h"

namespace directkv::bench {
namespace {

constexpr int kInFlight = 8;

__device__ __forceinline__ unsigned fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }

// All blocks walk the buffer together: one load instruction of the grid covers ctas * 4 KiB. The 4
// in the launch bounds lets the compiler spend the registers that 8 loads in flight need; without
// it 5 are in flight.
__global__ void __launch_bounds__(kReadThreads, 4)
    read_kernel(const uint4* __restrict__ data, int64_t count, uint32_t* checksums) {
  __shared__ unsigned warp_sums[kReadThreads / 32];
  const int64_t stride = int64_t{gridDim.x} * kReadThreads;
  int64_t i = int64_t{blockIdx.x} * kReadThreads + threadIdx.x;
  unsigned sum = 0;
  for (; i + (kInFlight - 1) * stride < count; i += kInFlight * stride) {
    uint4 loaded[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) loaded[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) sum ^= fold(loaded[u]);
  }
  for (; i < count; i += stride) sum ^= fold(__ldcs(data + i));
  sum = __reduce_xor_sync(0xffffffffu, sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kReadThreads / 32; ++w) sum ^= warp_sums[w];
    checksums[blockIdx.x] = sum;
  }
}

}  // namespace

cudaError_t read(const void* data, int64_t bytes, int ctas, uint32_t* checksums,
                 cudaStream_t stream) {
  if (bytes < 0 || bytes % 16 != 0 || ctas < 1) return cudaErrorInvalidValue;
  read_kernel<<<ctas, kReadThreads, 0, stream>>>(static_cast<const uint4*>(data), bytes / 16,
                                                 checksums);
  return cudaGetLastError();
}

}  // namespace directkv::bench

#include <array>
#include <mutex>

#include "device.cuh"
#include "device_limits.h"

namespace directkv::cuda {

#if defined(DIRECTKV_EMULATE_CUDA)

const DeviceLimits& device_limits() {
  // A part with bulk copies, or a small one without.
  constexpr int kShared = DIRECTKV_BULK_COPIES ? 228 * 1024 : 100 * 1024;
  static const DeviceLimits limits = {
      4, kShared, kShared - 1024, DIRECTKV_BULK_COPIES != 0, DIRECTKV_BULK_COPIES != 0, false};
  return limits;
}

#else

namespace {

// Stands for all kernels of this library: compiled for the same architectures.
__global__ void any_kernel() {}

// The code that the device runs, which may be older than the device (PTX of an earlier one).
bool compiled_for_bulk_copies() {
  cudaFuncAttributes found = {};
  if (cudaFuncGetAttributes(&found, any_kernel) != cudaSuccess) cudaGetLastError();
  return found.ptxVersion >= 90;
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, name, device) != cudaSuccess) cudaGetLastError();
  return value;
}

DeviceLimits ask(int device) {
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9 && compiled_for_bulk_copies(),
          DIRECTKV_SM90A && attribute(cudaDevAttrComputeCapabilityMajor, device) == 9 &&
              attribute(cudaDevAttrComputeCapabilityMinor, device) == 0,
          attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables, device) != 0};
}

}  // namespace

const DeviceLimits& device_limits() {
  constexpr int kDevices = 64;
  static std::array<DeviceLimits, kDevices> known;
  static std::array<std::once_flag, kDevices> asked;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) cudaGetLastError();
  device = device < kDevices ? device : 0;
  std::call_once(asked[device], [device] { known[device] = ask(device); });
  return known[device];
}

#endif

}  // namespace directkv::cuda

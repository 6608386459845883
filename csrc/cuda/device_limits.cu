#include <array>
#include <mutex>

#include "device.cuh"
#include "device_limits.h"

namespace directkv::cuda {

#if defined(DIRECTKV_EMULATE_CUDA)

const DeviceLimits& device_limits() {
  static const DeviceLimits limits = {4, 228 * 1024, 227 * 1024, true, false};
  return limits;
}

#else

namespace {

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, name, device) != cudaSuccess) cudaGetLastError();
  return value;
}

DeviceLimits ask(int device) {
  return {attribute(cudaDevAttrMultiProcessorCount, device),
          attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          attribute(cudaDevAttrComputeCapabilityMajor, device) >= 9,
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

// What the current GPU offers to a launch.
#pragma once

// The build has the kernels of chunk.cu; a build that does not say so has not.
#if !defined(DIRECTKV_SM90A)
#define DIRECTKV_SM90A 0
#endif

namespace directkv::cuda {

struct DeviceLimits {
  int sm_count;
  int shared_per_sm, shared_per_block;  // bytes
  bool bulk_copies;    // compute capability 9.0 and later, and kernels compiled for it
  bool warpgroups;     // compute capability 9.0 itself, and the build has kernels for it
  bool coherent_link;  // NVLink-C2C: the GPU reaches pageable host memory through the CPU's tables
};

// Of the current device; asked once for each.
const DeviceLimits& device_limits();

}  // namespace directkv::cuda

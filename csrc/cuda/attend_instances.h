// The compiled attend kernels: every head dim for every dtype, spread over a few files so that they
// build in parallel.
#pragma once

#include "attend_kernel.cuh"

#define DIRECTKV_HEAD_DIMS(INSTANCE, dtype) \
  INSTANCE(dtype, 64)                       \
  INSTANCE(dtype, 80)                       \
  INSTANCE(dtype, 96)                       \
  INSTANCE(dtype, 128)                      \
  INSTANCE(dtype, 256)

#define DIRECTKV_DEFINE_ATTEND(dtype, head_dim)               \
  template cudaError_t launch_attend<DType::dtype, head_dim>( \
      const AttendParams&, const AttendPlan&, const DeviceLimits&, AttendGrid*, cudaStream_t);

#define DIRECTKV_DECLARE_ATTEND(dtype, head_dim) extern DIRECTKV_DEFINE_ATTEND(dtype, head_dim)

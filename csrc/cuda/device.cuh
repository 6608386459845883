// The machine operations the kernels use beyond C++: shared memory, asynchronous copies into it,
// barriers, and the launch. Under DIRECTKV_EMULATE_CUDA the same kernels are compiled by a host
// compiler and these come from tests/cpp/cuda_emulation.h.
#pragma once

#if defined(DIRECTKV_EMULATE_CUDA)
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#endif

#include <cstddef>
#include <cstdint>

#include "device_limits.h"

// The copy engine of an SM (bulk copies that complete on a barrier) came with compute
// capability 9.0.
#if defined(DIRECTKV_EMULATE_SM80)
#define DIRECTKV_BULK_COPIES 0
#elif defined(DIRECTKV_EMULATE_CUDA) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900)
#define DIRECTKV_BULK_COPIES 1
#else
#define DIRECTKV_BULK_COPIES 0
#endif

namespace directkv::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

struct LaunchShape {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;     // CTAs, a divisor of `blocks`; more than 1 from compute capability 9.0
  bool alone = false;  // starts when all earlier kernels have ended
};

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x) % 32; }

#if !defined(DIRECTKV_EMULATE_CUDA)

// Aligned for copies with a 128-byte swizzle, whose pattern repeats every 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char storage[];
  return storage;
}

__device__ __forceinline__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Starts copying 16 bytes from global memory (device or mapped host) to shared memory, past L1.
// Both addresses are multiples of 16.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)),
               "l"(global)
               : "memory");
}

// The same, or 16 zeros where `there` is false and nothing is read.
__device__ __forceinline__ void copy_async_16_or_zeros(void* shared, const void* global,
                                                       bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)),
               "l"(global), "r"(there ? 16 : 0)
               : "memory");
}

// A load past L1, of what another kernel may be writing: no later load finds it there.
__device__ __forceinline__ int32_t load_relaxed(const int32_t* p) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// A flag in global memory. Cleared: once this returns no thread of the GPU finds it raised. The old
// value is waited for, which takes one round trip; a fence would wait for all that the SM has in
// flight.
__device__ __forceinline__ void clear_flag(int32_t* flag) {
  asm volatile(
      "{ .reg .b32 old; .reg .pred p;\n"
      "atom.relaxed.gpu.global.exch.b32 old, [%0], 0;\n"
      "setp.eq.s32 p, old, -1;\n"
      "@p nanosleep.u32 0; }" ::"l"(flag)
      : "memory");
}
// Raised: after what this thread has written, and what it has seen written.
__device__ __forceinline__ void raise_flag(int32_t* flag) {
  asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
}
__device__ __forceinline__ void wait_for_flag(const int32_t* flag) {
  int32_t raised;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(raised) : "l"(flag) : "memory");
  } while (raised == 0);
}

// A barrier in shared memory: a phase is over when the announced arrivals and bytes have come.
using Barrier = uint64_t;

__device__ __forceinline__ void barrier_init(Barrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// After the last barrier_init, before the __syncthreads() that lets others use the barriers.
__device__ __forceinline__ void barrier_init_fence() {
#if DIRECTKV_BULK_COPIES
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(Barrier* barrier) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
      : "memory");
}

// The same once loads have brought what `loaded` depends on. An arrival waits for no load of its
// own: a bulk copy it allows can overtake ldmatrix queued behind bank conflicts, and did. So here
// something that depends on it comes first; what it does, and when, does not matter.
__device__ __forceinline__ void barrier_arrive_after(uint32_t loaded, Barrier* barrier) {
  asm volatile(
      "{ .reg .pred p; .reg .b64 state;\n"
      "setp.eq.u32 p, %1, 0x7fc17fc1;\n"
      "@p nanosleep.u32 0;\n"
      "mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)),
      "r"(loaded)
      : "memory");
}

// Arrives once this thread's copy_async_16 so far have landed; does not wait for it.
__device__ __forceinline__ void barrier_arrive_after_copies(Barrier* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

// Waits for the end of the phase of this parity; that of a fresh barrier's phase before the first
// (parity 1) is over.
__device__ __forceinline__ void barrier_wait(Barrier* barrier, unsigned parity) {
  unsigned done;
  do {
#if DIRECTKV_BULK_COPIES
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#else
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
#endif
  } while (!done);
}

#if DIRECTKV_BULK_COPIES
// The same where other CTAs of the cluster have stored what the barrier counts.
__device__ __forceinline__ void barrier_wait_for_cluster(Barrier* barrier, unsigned parity) {
  unsigned done;
  do {
    asm volatile(
        "{ .reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// Arrives and announces bytes that bulk copies will bring.
__device__ __forceinline__ void barrier_arrive_expecting(Barrier* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}
#endif

// Ordinary writes to shared memory so far come before a later bulk copy over the same place.
__device__ __forceinline__ void fence_before_bulk_copies() {
#if DIRECTKV_BULK_COPIES
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// __syncthreads() among `threads` threads of the CTA, a multiple of 32. `id`: 1 to 15.
__device__ __forceinline__ void sync_some(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same for a thread that does not wait for the others.
__device__ __forceinline__ void arrive_some(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Kernels that follow each other in a stream may overlap (compute capability 9.0): the next one is
// started before this one is done, and waits where it first needs what came before. Every kernel
// launched so calls wait_for_earlier_kernels() in all its threads, before global memory counts for
// it; so the end of one means the end of all before it. Three read before they wait:
//   merge_kernel     lengths, page table and layer, complete when attend_kernel, always the one
//                    before it, let it start;
//   attend_kernel    lengths, and looks again after;
//   attend_kernel after project_kernel   everything but the projection's results: project_kernel is
//                    launched alone, so all that came before it was complete when it started. For
//                    those it waits flag by flag (project_kernel.cuh), for the end of the
//                    projection when it has nothing else to do.
__device__ __forceinline__ void wait_for_earlier_kernels() {
#if DIRECTKV_BULK_COPIES
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be started once all CTAs have come here or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if DIRECTKV_BULK_COPIES
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The rank of this CTA in its cluster; consecutive CTAs form one.
__device__ __forceinline__ int cluster_rank() {
#if DIRECTKV_BULK_COPIES
  unsigned rank;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

// The barrier of all threads of the cluster, in two steps: once over, all its CTAs have started,
// and barriers that were initialised and fenced before the first are there for the others.
__device__ __forceinline__ void arrive_in_cluster() {
#if DIRECTKV_BULK_COPIES
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if DIRECTKV_BULK_COPIES
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

#if DIRECTKV_BULK_COPIES
// A place in the shared memory of the CTA `rank` of the cluster, which has started and has not
// ended: where `floats` is here. Stores count as 4 bytes on the barrier that is there where
// `barrier` is here.
// The cluster has at least two CTAs, and `rank` is another one.
class ClusterFloats {
 public:
  __device__ __forceinline__ ClusterFloats(const float* floats, const Barrier* barrier, int rank) {
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(floats_)
        : "r"(shared_address(floats)), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(barrier_)
        : "r"(shared_address(barrier)), "r"(rank));
  }
  __device__ __forceinline__ void store(int i, float value) const {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                     floats_ + 4 * i),
                 "r"(__float_as_uint(value)), "r"(barrier_)
                 : "memory");
  }

 private:
  unsigned floats_, barrier_;
};
#endif

// A load of what no kernel writes meanwhile and nobody reads again.
__device__ __forceinline__ uint4 load_once(const uint4* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p));
  return v;
}

// Launches a kernel of that kind, see wait_for_earlier_kernels(). The status is that of this launch
// alone: an older error of the process is not picked up.
template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t stream,
                   const Args&... args) {
  if (shape.blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  // Above 48 KiB, the kernel's static share included, a launch must have asked for it.
  const size_t shared_bytes = shape.shared_bytes;
  const void* const function = reinterpret_cast<const void*>(kernel);
  cudaError_t status = cudaSuccess;
  if (shared_bytes > 32 * 1024) {
    status = cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(shared_bytes));
  }
  // Kernels that overlap on an SM have one split between its L1 and shared memory.
  if (status == cudaSuccess)
    status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                  cudaSharedmemCarveoutMaxShared);
  if (status != cudaSuccess) {
    cudaGetLastError();  // reported here, so not left pending
    return status;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2] = {};
  if (device_limits().bulk_copies && !shape.alone) {
    cudaLaunchAttribute& overlap = attributes[config.numAttrs++];
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  config.attrs = attributes;
  status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (status != cudaSuccess) cudaGetLastError();
  return status;
}

#else

template <typename... Params, typename... Args>
cudaError_t launch(void (*kernel)(Params...), const LaunchShape& shape, cudaStream_t,
                   const Args&... args) {
  return emulated_launch(kernel, shape, args...);
}

#endif

}  // namespace directkv::cuda

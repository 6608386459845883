// Runs the CUDA kernels on the CPU, one cluster of thread blocks at a time, so that their indexing,
// masks and barriers are tested where there is no GPU: threads are fibers that switch at barriers
// and shuffles. Forced in front of csrc/cuda/device.cuh by DIRECTKV_EMULATE_CUDA.
//
// What it finds: wrong results, accesses out of bounds (with -fsanitize=address), barriers that not
// all threads reach, a missing barrier or wait (threads run in either order between barriers, and
// asynchronous copies land at once or as late as they may). What it cannot find: misaligned vector
// accesses beyond what -fsanitize=alignment reports, whether a copy engine or a matrix instruction
// is as it is described here, and anything about speed.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

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
#define __shared__ static  // one block runs at a time, but where there are clusters
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace directkv::emulation {

using Barrier = uint64_t;

struct Options {
  bool reverse = false;     // last thread first
  bool late_copies = true;  // asynchronous copies land when they are waited for, not at once
  unsigned stalls = 0;      // seed of random stalls of threads that come out of a barrier; 0: none
};
Options& options();

// For the next kernel launched: until a thread has waited for earlier kernels, or its warp for
// `flag`, it finds `before` at `p`, then what is there now.
void write_late(const void* p, std::vector<char> before, const int32_t* flag = nullptr);
void wait_for_earlier_kernels();
void wait_for_flag(const int32_t* flag);
void clear_flag(int32_t* flag);
void raise_flag(int32_t* flag);
void let_next_kernel_start();

void sync_block();
bool sync_block_or(bool predicate);
void sync_warp();
void sync_some(int id, int threads);
void arrive_some(int id, int threads);
// The 32 pointers that the lanes of this warp gave; valid until the next call of sync_warp().
const void* const* exchange(const void* own);
int lane();
unsigned char* dynamic_shared();
int cluster_rank();
void arrive_in_cluster();
void wait_for_cluster();
// See csrc/cuda/device.cuh.
class ClusterFloats {
 public:
  ClusterFloats(const float* floats, const Barrier* barrier, int rank);
  void store(int i, float value) const;

 private:
  int rank_;
  float* floats_;
  const Barrier* barrier_;
};
void run_grid(int64_t blocks, int threads, size_t shared_bytes, int cluster,
              const std::function<void()>& body);

void copy_async_16(void* to, const void* from);
void copy_async_16_or_zeros(void* to, const void* from, bool there);
void barrier_init(Barrier* barrier, int arrivals);
void barrier_arrive(Barrier* barrier);
void barrier_arrive_after(uint32_t loaded, Barrier* barrier);
void barrier_arrive_expecting(Barrier* barrier, int bytes);
void barrier_arrive_after_copies(Barrier* barrier);
void barrier_wait(Barrier* barrier, unsigned parity);

// See csrc/cuda/tile_map.cuh.
struct TileMap {
  const unsigned char* pages;
  int row_bytes, page_size;
  int64_t tiles;
  int span_bytes, box_tokens, box_spans;
};
struct BoxMap {
  const unsigned char* array;
  int size_x, size_y, size_z, box_x, box_y, box_z;
};
struct TokenMap {
  const unsigned char* tokens;
  int batch, count, token_bytes, head_bytes, box_tokens;
};
void copy_tokens(void* shared, const TokenMap* map, int token, int span, int row, Barrier* barrier);
void copy_run(void* shared, const void* global, int bytes, Barrier* barrier);
void copy_box_at(void* shared, const BoxMap* map, int x, int y, int z, Barrier* barrier);
void copy_box(void* shared, const TileMap* map, int row, int tile, int span, Barrier* barrier);

// What lane `from` passed as `value`.
template <typename T>
T shuffle(T value, int from) {
  const void* const* all = exchange(&value);
  T result;
  std::memcpy(&result, all[from], sizeof(T));
  sync_warp();
  return result;
}
unsigned ballot(bool predicate);

}  // namespace directkv::emulation

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

using std::max;
using std::min;
inline void __syncthreads() { directkv::emulation::sync_block(); }
inline int __syncthreads_or(int p) { return directkv::emulation::sync_block_or(p != 0); }
inline void __syncwarp() { directkv::emulation::sync_warp(); }
template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return directkv::emulation::shuffle(x, directkv::emulation::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int offset) {
  const int lane = directkv::emulation::lane();
  return directkv::emulation::shuffle(x, lane >= offset ? lane - offset : lane);
}
template <typename T>
T __shfl_sync(unsigned, T x, int from) {
  return directkv::emulation::shuffle(x, from % 32);
}
inline unsigned __ballot_sync(unsigned, bool p) { return directkv::emulation::ballot(p); }
inline bool __any_sync(unsigned, bool p) { return directkv::emulation::ballot(p) != 0; }
inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
inline int __ffs(int x) { return __builtin_ffs(x); }

namespace directkv::cuda {

using emulation::arrive_in_cluster;
using emulation::arrive_some;
using emulation::Barrier;
using emulation::barrier_arrive;
using emulation::barrier_arrive_after;
using emulation::barrier_arrive_after_copies;
using emulation::barrier_arrive_expecting;
using emulation::barrier_init;
using emulation::barrier_wait;
using emulation::clear_flag;
using emulation::cluster_rank;
using emulation::ClusterFloats;
using emulation::copy_async_16;
using emulation::copy_async_16_or_zeros;
using emulation::dynamic_shared;
using emulation::let_next_kernel_start;
using emulation::raise_flag;
using emulation::sync_some;
using emulation::wait_for_cluster;
using emulation::wait_for_earlier_kernels;
using emulation::wait_for_flag;

inline void barrier_init_fence() {}
inline void barrier_wait_for_cluster(Barrier* barrier, unsigned parity) {
  barrier_wait(barrier, parity);
}
inline void fence_before_bulk_copies() {}
inline int32_t load_relaxed(const int32_t* p) { return *p; }
inline uint4 load_once(const uint4* p) { return *p; }
inline float exp2_fast(float x) { return std::exp2(x); }
inline float reciprocal_fast(float x) { return 1.0f / x; }
inline float max_nan(float a, float b) { return a != a || b != b ? NAN : a > b ? a : b; }

// Fragments as in csrc/cuda/matrix.cuh.
template <bool kTransposed>
void load_matrices(uint32_t (&r)[4], const unsigned char* row) {
  const void* const* rows = emulation::exchange(row);
  const int lane = emulation::lane();
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int e = 0; e < 2; ++e) {
      const int i = kTransposed ? lane % 4 * 2 + e : lane / 4;
      const int j = kTransposed ? lane / 4 : lane % 4 * 2 + e;
      std::memcpy(&pair[e], static_cast<const unsigned char*>(rows[8 * m + i]) + 2 * j, 2);
    }
    std::memcpy(&r[m], pair, 4);
  }
  emulation::sync_warp();
}

template <typename Shape, typename... Params, typename... Args>
cudaError_t emulated_launch(void (*kernel)(Params...), const Shape& shape, const Args&... args) {
  emulation::run_grid(shape.blocks, shape.threads, shape.shared_bytes, shape.cluster,
                      [&] { kernel(args...); });
  return cudaSuccess;
}

}  // namespace directkv::cuda

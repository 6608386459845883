// Which order should the elements of a KV tile have in memory? Measures how fast CTAs fetch whole
// tiles (keys and values of 64 tokens, head dim 128, 16-bit: 32 KiB, contiguous) into a ring of
// shared-memory stages and read them again with ldmatrix, for each way of getting there without
// bank conflicts:
//
//   bulk      stored XOR-swizzled, one 1-D bulk copy per tile
//   bulk_16   the same with one copy per 16 tokens of keys or values (pages of 16 tokens)
//   plain     stored plainly, one 1-D bulk copy: ldmatrix meets 8-way bank conflicts
//   rows      stored plainly, one 1-D bulk copy per 256-byte row, to padded rows
//   tensor    stored plainly, one tensor-map copy per tile with the 128-byte swizzle
//   async     stored plainly, 16-byte cp.async by one warp, to padded rows
//
//   nvcc -O3 -std=c++17 -arch=sm_90 -o tile_fetch benchmarks/cuda/tile_fetch.cu && ./tile_fetch
//
// Prints one JSON object per line: what, where, CTAs, stages, GB/s (median of 5), sum of the data
// (the same for all ways that are right).
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                  \
  do {                                                                               \
    if (cudaError_t e = (call)) {                                                    \
      std::fprintf(stderr, "%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e)); \
      std::exit(1);                                                                  \
    }                                                                                \
  } while (0)

namespace {

enum Way { kBulk, kBulk16, kPlain, kRows, kTensor, kAsync };
const char* const kNames[] = {"bulk", "bulk_16", "plain", "rows", "tensor", "async"};

constexpr int kRowBytes = 256, kTileRows = 128, kTileBytes = kRowBytes * kTileRows;
constexpr int kConsumers = 4, kThreads = 32 * (kConsumers + 1), kMaxStages = 6;
constexpr int kPadded = kRowBytes + 16;

__host__ __device__ constexpr int stage_bytes(Way way) {
  return way == kRows || way == kAsync ? kTileRows * kPadded : kTileBytes;
}

__device__ unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

__device__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0,1,0,p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

__device__ void bulk(unsigned to, const char* from, int bytes, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

template <Way kWay>
__global__ void __launch_bounds__(kThreads)
    fetch(const char* data, const __grid_constant__ CUtensorMap map, int tiles, int stages,
          unsigned* sum) {
  extern __shared__ __align__(1024) char ring[];
  __shared__ __align__(8) uint64_t full[kMaxStages], empty[kMaxStages];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const unsigned full_at = shared_address(full), empty_at = shared_address(empty);
  const unsigned ring_at = shared_address(ring);
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(full_at + 8 * s));
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(empty_at + 8 * s), "r"(kConsumers));
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const int begin = static_cast<int>(static_cast<int64_t>(tiles) * blockIdx.x / gridDim.x);
  const int end = static_cast<int>(static_cast<int64_t>(tiles) * (blockIdx.x + 1) / gridDim.x);

  if (warp == kConsumers) {
    for (int i = begin, n = 0; i < end; ++i, ++n) {
      const int s = n % stages;
      const unsigned barrier = full_at + 8 * s, to = ring_at + s * stage_bytes(kWay);
      const char* from = data + static_cast<int64_t>(i) * kTileBytes;
      if (n >= stages) wait(empty_at + 8 * s, (n / stages + 1) & 1);
      if (kWay == kAsync) {
        for (int c = lane; c < kTileBytes / 16; c += 32)
          asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + c / 16 * kPadded +
                                                                         c % 16 * 16),
                       "l"(from + c * 16)
                       : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
        continue;
      }
      if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier),
                     "r"(kTileBytes)
                     : "memory");
      __syncwarp();
      if (kWay == kTensor) {
        if (lane == 0)
          asm volatile(
              "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
              "[%1, {%2, %3, %4}], [%5];" ::"r"(to),
              "l"(&map), "r"(0), "r"(i * kTileRows), "r"(0), "r"(barrier)
              : "memory");
      } else {
        constexpr int kCopy = kWay == kRows ? kRowBytes : kWay == kBulk16 ? 4096 : kTileBytes;
        constexpr int kTo = kWay == kRows ? kPadded : kCopy;
        for (int c = lane; c < kTileBytes / kCopy; c += 32)
          bulk(to + c * kTo, from + c * kCopy, kCopy, barrier);
      }
      if (lane != 0)
        asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
    }
    return;
  }
  unsigned acc = 0;
  for (int i = begin, n = 0; i < end; ++i, ++n) {
    const int s = n % stages;
    wait(full_at + 8 * s, (n / stages) & 1);
    const unsigned stage = ring_at + s * stage_bytes(kWay);
    // The warp's 32 rows, 4 of the 8 x 16 byte matrices at a time.
#pragma unroll 8
    for (int step = 0; step < 16; ++step) {
      const int row = warp * 32 + lane, chunk = step;
      unsigned at = row * kRowBytes + chunk * 16;
      if (kWay == kBulk || kWay == kBulk16) at ^= (row & 7) * 16;
      if (kWay == kRows || kWay == kAsync) at = row * kPadded + chunk * 16;
      if (kWay == kTensor)
        at = (chunk / 8) * (kTileRows * 128) + row * 128 + (((chunk % 8) ^ (row & 7)) * 16);
      unsigned r0, r1, r2, r3;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                   : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3)
                   : "r"(stage + at)
                   : "memory");
      acc += r0 + r1 + r2 + r3;
    }
    __syncwarp();
    if (lane == 0)
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(empty_at + 8 * s) : "memory");
  }
  atomicAdd(sum, acc);
}

CUtensorMap make_map(void* data, int64_t bytes) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                         cudaEnableDefault, &found));
  CUtensorMap map;
  const cuuint64_t dims[] = {64, static_cast<cuuint64_t>(bytes / kRowBytes), 2};
  const cuuint64_t strides[] = {kRowBytes, 128};
  const cuuint32_t box[] = {64, kTileRows, 2}, steps[] = {1, 1, 1};
  const CUresult status = reinterpret_cast<Encode>(entry)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, dims, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) std::fprintf(stderr, "cuTensorMapEncodeTiled: %d\n", status);
  return map;
}

template <Way kWay>
void measure(const char* where, char* data, int64_t bytes, const CUtensorMap& map,
             const std::vector<int>& grids, int ctas_per_sm) {
  const int stages =
      std::min<int>(kMaxStages, (ctas_per_sm == 1 ? 220 * 1024 : 110 * 1024) / stage_bytes(kWay));
  const int shared = stages * stage_bytes(kWay);
  CHECK(cudaFuncSetAttribute(fetch<kWay>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  unsigned* sum;
  CHECK(cudaMalloc(&sum, 4));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  for (int grid : grids) {
    std::vector<float> times;
    unsigned result = 0;
    for (int i = 0; i < 6; ++i) {
      CHECK(cudaMemset(sum, 0, 4));
      CHECK(cudaEventRecord(begin));
      fetch<kWay><<<grid, kThreads, shared>>>(data, map, static_cast<int>(bytes / kTileBytes),
                                              stages, sum);
      CHECK(cudaGetLastError());
      CHECK(cudaEventRecord(end));
      CHECK(cudaEventSynchronize(end));
      float ms;
      CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (i > 0) times.push_back(ms);
      CHECK(cudaMemcpy(&result, sum, 4, cudaMemcpyDeviceToHost));
    }
    std::sort(times.begin(), times.end());
    std::printf("{\"way\": \"%s\", \"memory\": \"%s\", \"ctas\": %d, \"stages\": %d, "
                "\"gb_per_s\": %.2f, \"sum\": %u}\n",
                kNames[kWay], where, grid, stages, bytes / times[times.size() / 2] / 1e6, result);
    std::fflush(stdout);
  }
}

void measure_all(const char* where, char* data, int64_t bytes, const std::vector<int>& grids,
                 int ctas_per_sm) {
  const CUtensorMap map = make_map(data, bytes);
  measure<kBulk>(where, data, bytes, map, grids, ctas_per_sm);
  measure<kBulk16>(where, data, bytes, map, grids, ctas_per_sm);
  measure<kPlain>(where, data, bytes, map, grids, ctas_per_sm);
  measure<kRows>(where, data, bytes, map, grids, ctas_per_sm);
  measure<kTensor>(where, data, bytes, map, grids, ctas_per_sm);
  measure<kAsync>(where, data, bytes, map, grids, ctas_per_sm);
}

}  // namespace

int main() {
  const int64_t host_bytes = int64_t{1} << 30, device_bytes = int64_t{8} << 30;
  std::vector<uint32_t> words(1 << 22);
  uint32_t state = 1;
  for (uint32_t& w : words) w = state = state * 1664525u + 1013904223u;
  char *host, *device;
  CHECK(cudaHostAlloc(&host, host_bytes, cudaHostAllocMapped));
  CHECK(cudaMalloc(&device, device_bytes));
  const int64_t piece = words.size() * 4;
  for (int64_t at = 0; at < host_bytes; at += piece)
    std::copy(words.begin(), words.end(), reinterpret_cast<uint32_t*>(host + at));
  for (int64_t at = 0; at < device_bytes; at += piece)
    CHECK(cudaMemcpy(device + at, words.data(), piece, cudaMemcpyHostToDevice));
  measure_all("host", host, host_bytes, {2, 4, 8, 16}, 1);
  measure_all("hbm", device, device_bytes, {132}, 1);
  measure_all("hbm", device, device_bytes, {264}, 2);
  return 0;
}

// The attend kernel without JAX: microseconds and GB/s of one decode attention over random pages,
// against a plain read of the same bytes in the same run. For tuning; `directkv bench attention` is
// the benchmark.
//
//   attend_sweep [host|device] B S K G H T [ctas...]
//
// Prints one JSON object per line; `layer_us`: of one append and attend in a CUDA graph of 32. Built
// by attend_sweep.py, and with the C++ tests (DIRECTKV_BUILD_TESTS).
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "../../csrc/cuda/chunk_plan.h"
#include "../../csrc/cuda/kernels.h"

namespace {

using directkv::AttendParams;
using directkv::DType;

void check(cudaError_t status, int line) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s\n", line, cudaGetErrorString(status));
  std::exit(1);
}
#define CHECK(call) check(call, __LINE__)

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* p;
  CHECK(cudaMalloc(&p, values.size() * sizeof(T)));
  CHECK(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}

std::vector<uint16_t> random_bf16(size_t n) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> values(n);
  for (uint16_t& v : values) {
    const float x = normal(rng);
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    v = static_cast<uint16_t>(bits >> 16);
  }
  return values;
}

// Keeps the GPU busy while the host queues what is timed, so that launches cost it nothing.
__global__ void spin(int64_t cycles) {
  for (const int64_t begin = clock64(); clock64() - begin < cycles;) {
  }
}

// The yardstick: 16-byte loads, 8 in flight for each lane.
__global__ void __launch_bounds__(256) read(const uint4* data, int64_t n, uint32_t* sum) {
  constexpr int kInFlight = 8;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  uint32_t total = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i + (kInFlight - 1) * stride < n;
       i += kInFlight * stride) {
    uint4 v[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) v[u] = __ldcs(data + i + u * stride);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) total += v[u].x ^ v[u].y ^ v[u].z ^ v[u].w;
  }
  if (total == 0x12345) *sum = total;
}

template <typename F>
double median_us(F run) {
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 7; ++i) {
    spin<<<1, 1>>>(2000000);
    CHECK(cudaEventRecord(begin));
    run();
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::sort(times.begin(), times.end());
  return 1e3 * times[times.size() / 2];
}

template <typename F>
cudaGraphExec_t captured(F run) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  run(stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  CHECK(cudaStreamDestroy(stream));
  return exec;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 8) return std::fprintf(stderr, "see the comment in the source\n"), 2;
  const bool host = !std::strcmp(argv[1], "host");
  const int B = std::atoi(argv[2]), S = std::atoi(argv[3]), K = std::atoi(argv[4]),
            G = std::atoi(argv[5]), H = std::atoi(argv[6]), T = std::atoi(argv[7]);
  const int page_size = 64, max_pages = (S + page_size - 1) / page_size + 1;
  const int64_t pages = int64_t{B} * max_pages;
  const int64_t bytes = pages * K * 2 * page_size * H * 2;
  void* pool;
  if (host) {
    CHECK(cudaHostAlloc(&pool, bytes, cudaHostAllocMapped));
  } else {
    CHECK(cudaMalloc(&pool, bytes));
  }
  const auto data = random_bf16(1 << 22);
  for (int64_t at = 0; at < bytes; at += 2 << 22)
    CHECK(cudaMemcpy(static_cast<char*>(pool) + at, data.data(),
                     std::min<int64_t>(2 << 22, bytes - at), cudaMemcpyDefault));
  std::vector<int32_t> table(pages);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(2));

  AttendParams p = {};
  p.cache = {{DType::kBF16, page_size, K, H}, pool, 1, pages, on_device(table),
             on_device(std::vector<int32_t>(B, S)), on_device(std::vector<int32_t>(1, 0)), B,
             max_pages};
  p.query = on_device(random_bf16(size_t(B) * T * K * G * H));
  p.key = on_device(random_bf16(size_t(B) * T * K * H));
  p.value = on_device(random_bf16(size_t(B) * T * K * H));
  p.seq_lengths = on_device(std::vector<int32_t>(B, T));
  p.query_tokens = p.fresh_tokens = T;
  p.query_heads = K * G;
  p.scale = 0.1f;
  p.window_left = -1;
  p.pages_on_host = host;
  CHECK(cudaMalloc(&p.out, size_t(B) * T * K * G * H * 2));
  CHECK(cudaMalloc(&p.lse, size_t(B) * T * K * G * 4));
  CHECK(cudaMalloc(&p.workspace, directkv::cuda::workspace_bytes(2, B, T, K * G, K, H, page_size,
                                                                 max_pages, host)));
  const directkv::AppendParams append = {p.cache, p.key, p.value, p.seq_lengths, T};
  const double kv = 4.0 * B * S * K * H;
  uint32_t* sum;
  CHECK(cudaMalloc(&sum, 4));
  const int64_t pieces = int64_t{4} * B * S * K * H / 16;
  const double read_us = median_us([&] {
    read<<<host ? 32 : 132 * 8, 256>>>(static_cast<const uint4*>(pool), pieces, sum);
    CHECK(cudaGetLastError());
  });
  std::vector<int> counts = {0};
  for (int i = 8; i < argc; ++i) counts.push_back(std::atoi(argv[i]));
  for (int ctas : counts) {
    p.num_ctas = ctas;
    const double us = median_us([&] { CHECK(directkv::cuda::attend(p, nullptr)); });
    constexpr int kLayers = 32;
    const cudaGraphExec_t layers = captured([&](cudaStream_t stream) {
      for (int i = 0; i < kLayers; ++i) {
        CHECK(directkv::cuda::attend(p, stream));
        CHECK(directkv::cuda::append(append, stream));
      }
    });
    const double layer_us =
        median_us([&] { CHECK(cudaGraphLaunch(layers, nullptr)); }) / kLayers;
    CHECK(cudaGraphExecDestroy(layers));
    std::printf("{\"placement\": \"%s\", \"B\": %d, \"S\": %d, \"K\": %d, \"G\": %d, \"H\": %d, "
                "\"T\": %d, \"ctas\": %d, \"us\": %.1f, \"gb_per_s\": %.2f, "
                "\"share_of_read\": %.3f, \"layer_us\": %.2f}\n",
                argv[1], B, S, K, G, H, T, ctas, us, kv / us / 1e3, read_us / us, layer_us);
    std::fflush(stdout);
  }
  return 0;
}

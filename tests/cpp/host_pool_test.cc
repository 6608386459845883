// host_pool_create and host_pool_destroy, on a machine with a GPU and on one without.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/host_memory_limit.h"
#include "check.h"

namespace directkv::test {
namespace {

constexpr size_t kMiB = size_t{1} << 20, kGiB = size_t{1} << 30;

bool has_gpu() {
  static const bool found = [] {
    int count = 0;
    const bool any = cudaGetDeviceCount(&count) == cudaSuccess && count > 0;
    cudaGetLastError();
    return any;
  }();
  return found;
}

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

void expect_refusal(size_t bytes, int device, const std::vector<std::string>& words) {
  std::string error;
  const int64_t held = pool_bytes_held(), resident = resident_bytes();
  HostPool* pool = host_pool_create(bytes, device, &error);
  CHECK(pool == nullptr, "%zu bytes should not be had", bytes);
  for (const std::string& word : words)
    CHECK(error.find(word) != std::string::npos, "'%s' is not in: %s", word.c_str(), error.c_str());
  // Without a driver this call itself fails.
  CHECK(!has_gpu() || cudaPeekAtLastError() == cudaSuccess, "a CUDA error is left pending");
  CHECK(pool_bytes_held() == held, "nothing is counted");
  CHECK(resident_bytes() < resident + static_cast<int64_t>(512 * kMiB), "nothing stays touched");
  std::printf("  %s\n", error.c_str());
}

TEST(pool_without_gpu) {
  if (has_gpu()) return;
  expect_refusal(kMiB, 0, {"cudaSetDevice"});
}

TEST(pool_refuses_nonsense) {
  expect_refusal(0, 0, {"0 bytes"});
  expect_refusal(SIZE_MAX, 0, {"2^60"});
  expect_refusal(kMiB, 12345, {"cudaSetDevice"});
}

TEST(pool_serves_the_gpu) {
  if (!has_gpu()) return;
  for (const size_t bytes : {size_t{1}, 3 * kMiB + 17, kGiB + 5 * kMiB}) {  // the last: two slices
    std::string error;
    HostPool* pool = host_pool_create(bytes, 0, &error);
    CHECK(pool != nullptr, "%zu bytes: %s", bytes, error.c_str());
    if (!pool) return;
    char* data = static_cast<char*>(host_pool_data(pool));
    const size_t page = sysconf(_SC_PAGESIZE);
    CHECK(host_pool_bytes(pool) == (bytes + page - 1) / page * page, "whole pages");
    CHECK(reinterpret_cast<uintptr_t>(data) % (2 * kMiB) == 0, "aligned to huge pages");
    CHECK(pool_bytes_held() == static_cast<int64_t>(host_pool_bytes(pool)), "counted");
    for (const size_t at : {size_t{0}, bytes / 2, bytes - 1}) {
      cudaPointerAttributes attributes = {};
      CHECK(cudaPointerGetAttributes(&attributes, data + at) == cudaSuccess, "attributes");
      CHECK(attributes.type == cudaMemoryTypeHost, "page-locked host memory");
      CHECK(attributes.devicePointer == data + at, "the GPU reads it at the same address");
    }
    data[bytes - 1] = 42;
    char* device = nullptr;
    char back = 0;
    CHECK(cudaMalloc(reinterpret_cast<void**>(&device), 1) == cudaSuccess, "cudaMalloc");
    CHECK(cudaMemcpy(device, data + bytes - 1, 1, cudaMemcpyDefault) == cudaSuccess, "to device");
    CHECK(cudaMemcpy(&back, device, 1, cudaMemcpyDefault) == cudaSuccess, "and back");
    CHECK(back == 42, "%d", back);
    cudaFree(device);
    if (bytes > kGiB) {
      CHECK(cudaMalloc(reinterpret_cast<void**>(&device), 2 * kMiB) == cudaSuccess, "cudaMalloc");
      CHECK(cudaMemcpy(device, data + kGiB - kMiB, 2 * kMiB, cudaMemcpyDefault) == cudaSuccess,
            "a copy across two slices");
      cudaFree(device);
    }
    // From a thread of its own, as a DLPack deleter may be.
    std::thread([pool] { host_pool_destroy(pool); }).join();
    CHECK(pool_bytes_held() == 0, "given back");
    CHECK(cudaPeekAtLastError() == cudaSuccess, "no error is left pending");
  }
}

TEST(pool_respects_the_variable) {
  if (!has_gpu()) return;
  setenv(kMemoryLimitVariable, "0.25", 1);
  expect_refusal(kGiB / 2, 0, {"0.50 GiB", "536870912 bytes", "0.25 GiB", kMemoryLimitVariable});
  std::string error;
  HostPool* pool = host_pool_create(kGiB / 8, 0, &error);
  CHECK(pool != nullptr, "%s", error.c_str());
  expect_refusal(kGiB / 4, 0, {"0.12 GiB are available"});
  host_pool_destroy(pool);
  unsetenv(kMemoryLimitVariable);
}

TEST(pool_larger_than_the_machine) {
  if (!has_gpu()) return;
  expect_refusal(size_t{1} << 50, 0, {"1048576.00 GiB", kMemoryLimitVariable});
  expect_refusal(static_cast<size_t>(host_memory_limit().limit) * 20, 0, {kMemoryLimitVariable});
}

TEST(pool_destroy_null) { host_pool_destroy(nullptr); }

}  // namespace
}  // namespace directkv::test

// Page-locked host memory: mapped, placed, touched and registered, or nothing at all.
#include "host_pool.h"

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "host_memory_limit.h"
#include "host_memory_room.h"

namespace directkv {

struct HostPool {
  char* data = nullptr;
  size_t bytes = 0;  // whole pages
  int device = 0;
  bool registered = false;
  int64_t counted = 0;  // touched: what this pool added to pool_bytes_held()
};

namespace {

constexpr size_t kSliceBytes = size_t{1} << 30;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kMaxTouchThreads = 8;

std::string cuda_failure(const char* call, size_t asked, cudaError_t status) {
  cudaGetLastError();  // not left pending for whoever calls CUDA next
  return "page-locked host memory: asked for " + gib(asked) + " (" + std::to_string(asked) +
         " bytes), but " + call + " failed: " + cudaGetErrorString(status) + " (" +
         cudaGetErrorName(status) + ").";
}

// Pages come from the node of the thread that touches them first unless the mapping says otherwise.
// Preferred, not bound: a full node then overflows to the next instead of killing the process.
// Without NUMA, or where the kernel refuses, it stays as it is.
void prefer_node(void* data, size_t bytes, int node) {
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>
  constexpr int kWordBits = 8 * sizeof(unsigned long);
  unsigned long mask[16] = {};
  if (node < 0 || node >= 16 * kWordBits) return;
  mask[node / kWordBits] = 1ul << node % kWordBits;
#if defined(SYS_mbind)
  (void)syscall(SYS_mbind, data, bytes, kPreferred, mask, 16 * kWordBits, 0);
#endif
}

// Writes one byte of every 4 KiB: the kernel zeroes the page and it stays.
void touch(char* data, size_t bytes) {
  constexpr size_t kStep = 4096;
  const int count = std::clamp<int>(std::thread::hardware_concurrency(), 1, kMaxTouchThreads);
  const size_t part = (bytes / count + kHugePage) / kHugePage * kHugePage;
  const auto work = [&](size_t begin) {
    const size_t end = std::min(bytes, begin + part);
    for (size_t i = begin; i < end; i += kStep) *const_cast<volatile char*>(data + i) = 0;
  };
  std::vector<std::thread> threads;
  for (size_t begin = part; begin < bytes; begin += part) {
    try {
      threads.emplace_back(work, begin);
    } catch (const std::system_error&) {  // no more threads: slower, not wrong
      work(begin);
    }
  }
  work(0);
  for (std::thread& t : threads) t.join();
}

// An anonymous mapping aligned to huge pages; null with errno set.
char* map_aligned(size_t bytes) {
  const size_t mapped = bytes + kHugePage;
  // NORESERVE: the kernel's own guess refuses more than MemTotal, which may be about to grow.
  void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(p);
  char* const data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) /
                                             kHugePage * kHugePage);
  if (data > begin) munmap(begin, data - begin);
  const size_t behind = begin + mapped - (data + bytes);
  if (behind > 0) munmap(data + bytes, behind);
  madvise(data, bytes, MADV_HUGEPAGE);  // fewer faults, fewer translations; a wish
  madvise(data, bytes, MADV_DONTFORK);  // a child would copy on write what the GPU writes to
  return data;
}

// Makes a device current for a while: registration belongs to a context.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    status_ = cudaSetDevice(device);
  }
  ~DeviceScope() {
    if (before_ >= 0 && before_ != device_) cudaSetDevice(before_);
    cudaGetLastError();
  }
  cudaError_t status() const { return status_; }

 private:
  int device_, before_ = -1;
  cudaError_t status_;
};

// Touches the whole pool, slice by slice: before each the memory that is left is looked at anew.
bool touch_all(HostPool* pool, size_t asked, std::string* error) {
  for (size_t taken = 0; taken < pool->bytes; taken += kSliceBytes) {
    const size_t bytes = std::min(kSliceBytes, pool->bytes - taken);
    if (!wait_for_memory(static_cast<int64_t>(bytes), asked, taken, error)) return false;
    touch(pool->data + taken, bytes);
    pool->counted += static_cast<int64_t>(bytes);
    add_pool_bytes(static_cast<int64_t>(bytes));
  }
  return true;
}

// In one piece: no copy of CUDA's may reach from one registration into another.
bool register_all(HostPool* pool, size_t asked, std::string* error) {
  cudaError_t status =
      cudaHostRegister(pool->data, pool->bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (status != cudaSuccess) {
    *error = cuda_failure("cudaHostRegister", asked, status);
    return false;
  }
  pool->registered = true;
  void* on_device = nullptr;
  status = cudaHostGetDevicePointer(&on_device, pool->data, 0);
  if (status != cudaSuccess) {
    *error = cuda_failure("cudaHostGetDevicePointer", asked, status);
    return false;
  }
  if (on_device != pool->data) {
    *error =
        "page-locked host memory: this device reads it at other addresses than the CPU, "
        "which the kernels do not support.";
    return false;
  }
  return true;
}

std::mutex creating;  // two pools must not both count on the same free memory

}  // namespace

HostPool* host_pool_create(size_t bytes, int device_ordinal, std::string* error) {
  // Released under the same scope: what fails below leaves no mapping, registration or error.
  struct Destroy {
    void operator()(HostPool* pool) const { host_pool_destroy(pool); }
  };
  std::lock_guard<std::mutex> lock(creating);
  const size_t page = sysconf(_SC_PAGESIZE);
  if (bytes == 0 || bytes > size_t{1} << 60) {
    *error = "page-locked host memory: asked for " + std::to_string(bytes) +
             " bytes; expected 1 byte to 2^60.";
    return nullptr;
  }
  const size_t rounded = (bytes + page - 1) / page * page;
  const DeviceScope scope(device_ordinal);
  if (scope.status() != cudaSuccess) {
    *error = cuda_failure("cudaSetDevice", bytes, scope.status());
    return nullptr;
  }
  if (!memory_plausible(static_cast<int64_t>(rounded), error)) return nullptr;

  std::unique_ptr<HostPool, Destroy> pool(new HostPool);
  pool->device = device_ordinal;
  pool->data = map_aligned(rounded);
  if (!pool->data) {
    *error = "page-locked host memory: asked for " + gib(bytes) +
             ", but mmap failed: " + std::strerror(errno) + ".";
    return nullptr;
  }
  pool->bytes = rounded;
  int node = -1;
  // The CPU's node: cudaDevAttrNumaId is the GPU's own memory on GH200.
  if (cudaDeviceGetAttribute(&node, cudaDevAttrHostNumaId, device_ordinal) != cudaSuccess) {
    cudaGetLastError();
    node = -1;
  }
  prefer_node(pool->data, rounded, node);
  if (!touch_all(pool.get(), bytes, error)) return nullptr;
  if (!register_all(pool.get(), bytes, error)) return nullptr;
  return pool.release();
}

void* host_pool_data(const HostPool* pool) { return pool->data; }
size_t host_pool_bytes(const HostPool* pool) { return pool->bytes; }

void host_pool_destroy(HostPool* pool) {
  if (!pool) return;
  if (pool->registered) {
    // At process exit the driver may be gone already (cudaErrorCudartUnloading), and what it had
    // locked with it: every error is ignored, and none is left pending.
    const DeviceScope scope(pool->device);
    cudaHostUnregister(pool->data);
  }
  if (pool->data) munmap(pool->data, pool->bytes);
  add_pool_bytes(-pool->counted);
  delete pool;
}

}  // namespace directkv

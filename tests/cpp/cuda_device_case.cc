#include "cuda_device_case.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../../csrc/cuda/kernels.h"
#include "check.h"
#if !defined(DIRECTKV_EMULATE_CUDA)
#include "../../csrc/host_pool.h"
#endif

namespace directkv::test {
namespace {

constexpr size_t kGuardBytes = 256;
bool quick_mode = false;

}  // namespace

bool quick() { return quick_mode; }
void set_quick() { quick_mode = true; }

const char* name(Placement placement) {
  constexpr const char* kNames[] = {"device", "pinned", "pool"};
  return kNames[static_cast<int>(placement)];
}

const std::vector<Placement>& placements() {
#if defined(DIRECTKV_EMULATE_CUDA)
  // All memory is the same there; the kernels are launched as for a host's.
  static const std::vector<Placement> all = {Placement::kPinned};
#else
  static const std::vector<Placement> all = {Placement::kDevice, Placement::kPinned,
                                             Placement::kPool};
#endif
  return all;
}

void cuda_check(cudaError_t status, const char* call, const char* file, int line) {
  if (status == cudaSuccess) return;
  std::printf("%s:%d: %s: %s\n", file, line, call, cudaGetErrorString(status));
  std::exit(2);
}

Buffer::Buffer(size_t bytes, Placement placement) : placement_(placement), bytes_(bytes) {
  const size_t total = bytes + kGuardBytes;
  void* p = nullptr;
  switch (placement) {
    case Placement::kDevice: CUDA_CHECK(cudaMalloc(&p, total)); break;
    case Placement::kPinned:
      CUDA_CHECK(cudaHostAlloc(&p, total, cudaHostAllocPortable | cudaHostAllocMapped));
      break;
    case Placement::kPool:
#if !defined(DIRECTKV_EMULATE_CUDA)
      std::string error;
      HostPool* pool = host_pool_create(total, 0, &error);
      if (!pool) {
        std::printf("host_pool_create: %s\n", error.c_str());
        std::exit(2);
      }
      p = host_pool_data(pool);
      pool_ = pool;
#endif
      break;
  }
  data_ = static_cast<char*>(p);
  const std::vector<char> guard(kGuardBytes, 0x5a);
  CUDA_CHECK(cudaMemcpy(data_ + bytes_, guard.data(), kGuardBytes, cudaMemcpyDefault));
}

Buffer::~Buffer() {
  std::vector<char> guard(kGuardBytes);
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(guard.data(), data_ + bytes_, kGuardBytes, cudaMemcpyDefault));
  for (char c : guard) {
    if (c == 0x5a) continue;
    CHECK(false, "%zu bytes in %s memory: written beyond the end", bytes_, name(placement_));
    break;
  }
  if (placement_ == Placement::kDevice) CUDA_CHECK(cudaFree(data_));
  if (placement_ == Placement::kPinned) CUDA_CHECK(cudaFreeHost(data_));
#if !defined(DIRECTKV_EMULATE_CUDA)
  if (pool_) host_pool_destroy(static_cast<HostPool*>(pool_));
#endif
}

void Buffer::upload(const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpy(data_, from, bytes, cudaMemcpyDefault));
}

void Buffer::download(void* to) const {
  CUDA_CHECK(cudaMemcpy(to, data_, bytes_, cudaMemcpyDefault));
}

DeviceCase::DeviceCase(AttendCase& c, Placement placement)
    : case_(c),
      placement_(placement),
      pages_(c.pages.size(), placement),
      table_(4 * c.page_table.size(), Placement::kDevice),
      lengths_(4 * c.lengths.size(), Placement::kDevice),
      seq_lengths_(4 * c.seq_lengths.size(), Placement::kDevice),
      layer_(4, Placement::kDevice),
      query_(c.query.size(), Placement::kDevice),
      key_(c.key.size(), Placement::kDevice),
      value_(c.value.size(), Placement::kDevice),
      out_(c.out.size(), Placement::kDevice),
      lse_(4 * c.lse.size(), Placement::kDevice),
      workspace_(4 * c.workspace.size(), Placement::kDevice) {
  upload_pages();
  query_.upload(c.query.data());
  key_.upload(c.key.data());
  value_.upload(c.value.data());
  upload_bookkeeping();
}

void DeviceCase::upload_pages() { pages_.upload(case_.pages.data()); }

void DeviceCase::upload_bookkeeping() {
  table_.upload(case_.page_table.data());
  lengths_.upload(case_.lengths.data());
  seq_lengths_.upload(case_.seq_lengths.data());
  layer_.upload(&case_.layer);
}

AttendParams DeviceCase::params() const {
  AttendParams p = case_.params();
  p.cache.pages = pages_.get();
  p.cache.page_table = static_cast<const int32_t*>(table_.get());
  p.cache.lengths = static_cast<const int32_t*>(lengths_.get());
  p.cache.layer = static_cast<const int32_t*>(layer_.get());
  p.query = query_.get();
  // Without fresh tokens the pointers must not be followed.
  p.key = case_.shape.fresh ? key_.get() : reinterpret_cast<void*>(16);
  p.value = case_.shape.fresh ? value_.get() : nullptr;
  p.seq_lengths = static_cast<const int32_t*>(seq_lengths_.get());
  p.out = out_.get();
  p.lse = static_cast<float*>(lse_.get());
  p.workspace = workspace_.get();
  p.num_ctas = case_.shape.num_ctas;
  p.ring_slot_bytes = case_.shape.ring_slot_bytes;
  p.pages_on_host = placement_ != Placement::kDevice;
  return p;
}

AppendParams DeviceCase::append_params() const {
  const AttendParams p = params();
  return {p.cache, key_.get(), value_.get(), p.seq_lengths, p.query_tokens};
}

void DeviceCase::poison() {
  case_.poison_outputs();
  out_.upload(case_.out.data());
  lse_.upload(case_.lse.data());
  workspace_.upload(case_.workspace.data());
}

void DeviceCase::download_outputs() {
  out_.download(case_.out.data());
  lse_.download(case_.lse.data());
}

void DeviceCase::attend(cudaStream_t stream) {
  poison();
  CUDA_CHECK(cuda::attend(params(), stream));
  CUDA_CHECK(cudaDeviceSynchronize());
  download_outputs();
  std::vector<char> pages(case_.pages.size());
  pages_.download(pages.data());
  CHECK(pages == case_.pages, "attend changed the cache: %s", case_.shape.text().c_str());
}

void DeviceCase::append(cudaStream_t stream) {
  CUDA_CHECK(cuda::append(append_params(), stream));
  CUDA_CHECK(cudaDeviceSynchronize());
  pages_.download(case_.pages.data());
}

}  // namespace directkv::test

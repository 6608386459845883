// Page-locked host memory for big caches: exact size, huge pages, touched slice by slice.
// No CUDA type appears here; the binding includes this header and never sees CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace directkv {

struct HostPool;  // owns one mapping

struct MemoryLimit {
  int64_t available;   // bytes that can still be taken
  int64_t limit;       // bytes, the binding limit
  const char* source;  // which limit binds: "cgroup memory.max" or "MemTotal"
};
MemoryLimit host_memory_limit();

// Maps and page-locks `bytes` for `device_ordinal`, on the host NUMA node nearest to it. Null on
// failure, `*error` then says what was asked, what was available, which limit and how to lower the
// request; nothing stays mapped or registered and no CUDA error is left pending.
HostPool* host_pool_create(size_t bytes, int device_ordinal, std::string* error);
void* host_pool_data(const HostPool* pool);
size_t host_pool_bytes(const HostPool* pool);
void host_pool_destroy(HostPool* pool);  // takes no lock of Python's; callable from any thread

}  // namespace directkv

#include "buffer_registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace directkv {
namespace {

std::shared_mutex mutex;
std::unordered_map<const void*, size_t> buffers;

}  // namespace

void register_buffer(const void* p, size_t bytes) {
  std::unique_lock lock(mutex);
  buffers[p] = bytes;
}

void unregister_buffer(const void* p) {
  std::unique_lock lock(mutex);
  buffers.erase(p);
}

bool buffer_registered(const void* p, size_t bytes) {
  std::shared_lock lock(mutex);
  const auto found = buffers.find(p);
  return found != buffers.end() && found->second == bytes;
}

}  // namespace directkv

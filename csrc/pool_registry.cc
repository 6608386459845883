#include "pool_registry.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>

namespace directkv {
namespace {

std::shared_mutex mutex;
std::map<uintptr_t, size_t> ranges;  // first address -> bytes

}  // namespace

void register_range(const void* p, size_t bytes) {
  std::unique_lock lock(mutex);
  ranges[reinterpret_cast<uintptr_t>(p)] = bytes;
}

void unregister_range(const void* p) {
  std::unique_lock lock(mutex);
  ranges.erase(reinterpret_cast<uintptr_t>(p));
}

bool range_registered(const void* p) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  std::shared_lock lock(mutex);
  auto after = ranges.upper_bound(address);
  if (after == ranges.begin()) return false;
  const auto& [first, bytes] = *--after;
  return address - first < bytes;
}

}  // namespace directkv

// The address ranges of live caches, so that a call can tell the cache from a copy XLA made of it.
#pragma once

#include <cstddef>

namespace directkv {

void register_range(const void* p, size_t bytes);
void unregister_range(const void* p);
bool range_registered(const void* p);  // p lies inside a registered range

}  // namespace directkv

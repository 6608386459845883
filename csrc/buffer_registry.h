// The buffers of live caches, so that a call can tell the cache from a copy XLA made of it.
//
// Address and size must both agree: nobody says when a small cache is freed, and its address may
// then serve another buffer. One of the same size at the same place would pass; all others do not.
#pragma once

#include <cstddef>

namespace directkv {

void register_buffer(const void* p, size_t bytes);
void unregister_buffer(const void* p);
bool buffer_registered(const void* p, size_t bytes);

}  // namespace directkv

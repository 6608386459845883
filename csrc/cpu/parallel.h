// A parallel loop that cannot deadlock on a borrowed thread pool.
#pragma once

#include <cstdint>
#include <functional>

#include "kernels.h"

namespace directkv::cpu {

// `slot` tells the threads of one call apart: 0 is the caller, 1..workers are helpers.
using ChunkFn = std::function<void(int64_t chunk, int slot)>;

// Runs fn for every chunk in [0, n) and returns when all have finished.
//
// The caller takes chunks from the same counter as its helpers and then waits only for chunks that
// a helper has begun. A helper that the pool runs late, or never, is not waited for: two handlers
// that both filled the pool would otherwise wait for each other's queued tasks for ever.
// `fn` must not throw.
void parallel_chunks(int64_t n, const Executor& executor, const ChunkFn& fn);

}  // namespace directkv::cpu

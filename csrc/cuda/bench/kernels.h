// The benchmark primitives, as their FFI handlers launch them. Never part of a product call.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "marks.h"

namespace directkv::bench {

// Records the event of `slot` on the stream. With spin_us > 0 a kernel that takes that long runs
// first: what the host enqueues meanwhile starts back to back, so that the time after the mark
// holds no launch latency.
cudaError_t mark(int slot, int spin_us, cudaStream_t stream);

constexpr int kReadThreads = 256;

// Reads `bytes` (a multiple of 16) of host or device memory with `ctas` blocks, 16 bytes per lane
// and 8 loads in flight; checksums [ctas] holds the XOR of the words each block read.
cudaError_t read(const void* data, int64_t bytes, int ctas, uint32_t* checksums,
                 cudaStream_t stream);

// Decode attention over a token-major cache, the usual way: each query head reads the whole cache
// of its KV head for itself. One new token per row, 16-bit elements, H a multiple of 8 up to 256.
struct NaiveAttendParams {
  const void* query;        // [B, N, H]
  const void* key_cache;    // [B, S, K, H]
  const void* value_cache;  // [B, S, K, H]
  const int32_t* lengths;   // [B], in [0, S]
  void* out;                // [B, N, H]
  float* workspace;         // [B, N, splits, H + 2]
  bool bf16;                // else f16
  int batch, query_heads, kv_heads, head_dim, splits;
  int64_t slots;  // S
  float scale;    // multiplies q.k
};

cudaError_t naive_attend(const NaiveAttendParams& params, cudaStream_t stream);

}  // namespace directkv::bench

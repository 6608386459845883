// What a kernel is told: pointers, sizes and strides, nothing of XLA or Python.
//
// Letters, the same as in the Python docstrings: B batch, T new tokens, N query heads, K KV heads,
// G = N/K, H head dim, L layers, P pages. All arrays are dense, row-major. "device" pointers are
// GPU memory in the CUDA build and ordinary memory in the CPU build; `pages` may be either.
#pragma once

#include <cstdint>

#include "page_layout.h"

namespace directkv {

// The cache and its bookkeeping. Everything a request changes (lengths, tables, layer) is read
// from memory when the kernel runs, so that a captured CUDA graph can be replayed.
struct CacheView {
  PageLayout layout;
  void* pages;                // [L, P, K, E]; host or device memory
  int64_t num_layers;         // L
  int64_t num_pages;          // P
  const int32_t* page_table;  // [B, max_pages]
  const int32_t* lengths;     // [B] tokens already in the cache
  const int32_t* layer;       // [] which layer of `pages`
  int batch;                  // B
  int max_pages;              // page table width; capacity of a row = max_pages * page_size
};

// out = softmax(scale * q k^T) v over the cached tokens of a row followed by its fresh tokens.
//
// Query t of row b stands at position lengths[b] + t. It sees every cached token and the fresh
// tokens 0..t (causal), cut on the left by `window_left` when that is >= 0: only positions
// >= lengths[b] + t - window_left. With fresh_tokens == 0 there is no causal part.
//
// seq_lengths[b] says how many of the T queries (and fresh tokens) are valid. Queries at or beyond
// it give out = 0 and lse = -inf and read nothing. A row with lengths[b] outside
// [0, max_pages*page_size], seq_lengths[b] outside [0, T], layer outside [0, L), or that needs a
// page id outside [0, P), gives NaN in out and lse for its valid queries (all T of them where
// seq_lengths[b] itself is out of range); such a page is never dereferenced.
// Slots at or beyond the length may hold anything, NaN included: select, never multiply.
struct AttendParams {
  CacheView cache;
  const void* query;           // [B, T, N, H]      cache dtype
  const void* key;             // [B, fresh, K, H]  cache dtype; not read when fresh_tokens == 0
  const void* value;           // [B, fresh, K, H]
  const int32_t* seq_lengths;  // [B]
  void* out;                   // [B, T, N, H]      cache dtype
  float* lse;                  // [B, T, N]         natural log of the sum of exp(logits)
  void* workspace;             // uninitialised; attend_workspace_bytes() of the attend_plan.h
  int query_tokens;            // T
  int fresh_tokens;            // 0 or T
  int query_heads;             // N
  float scale;                 // multiplies q.k
  float soft_cap;              // > 0: logits = soft_cap * tanh(scale * q.k / soft_cap); 0: off
  int window_left;             // >= 0: see above; -1: off
  int num_ctas;                // CUDA: thread blocks to spread over; 0: chosen from the link
  int64_t ring_slot_bytes;     // CUDA: of a host cache's tokens on the device; 0: chosen, the most
  bool pages_on_host;          // CUDA: `pages` is host memory, read over the link
  // CUDA: those of the project() launched just before, which makes query, key and value; everything
  // else was complete when it started. Null: there was none.
  const int32_t* projected;
};

// query, key, value = x kernel + bias for each head, then an RMSNorm over each head of query and
// key, then RoPE: element i < R/2 of a query or key turns with element i + R/2. Sums, norms and
// rotation are float32 and rounded once.
struct ProjectParams {
  DType dtype;  // of x, all weights and the results: bfloat16 or float16
  int rows;     // B * T
  int width;    // D; a multiple of 8
  int kv_heads, group, head_dim;
  int rotary_dim;          // R; 0: no RoPE
  const void* x;           // [rows, D]
  const void* kernel;      // [D, K, G + 2, H]: G queries, the key, the value of each KV head
  const void* bias;        // [K, G + 2, H]; null: none
  const void* query_norm;  // [H]; null: none
  const void* key_norm;    // [H]; null: none
  const float* cos;        // [rows, R/2], times the factor of the RoPE
  const float* sin;        // [rows, R/2]
  float norm_eps;          // added to the mean square
  float norm_offset;       // added to the weights of the norms
  void* query;             // [rows, K * G, H]
  void* key;               // [rows, K, H]
  void* value;             // [rows, K, H]
  int32_t* projected;      // [rows, K * (G + 2)]: 1 when that head of the row has been written
  int ctas_per_head;       // that share the D of a head, at most 8; 0: chosen
};

// Writes seq_lengths[b] new tokens of each row at positions lengths[b]..., all or none: a row whose
// tokens do not all fit, or that needs a page id outside [0, P), or whose lengths/seq_lengths/layer
// is out of range, is left untouched.
struct AppendParams {
  CacheView cache;
  const void* key;             // [B, T, K, H]  cache dtype
  const void* value;           // [B, T, K, H]
  const int32_t* seq_lengths;  // [B]
  int new_tokens;              // T
};

// Copies n whole pages, all layers and heads, between the cache and a dense buffer [n, L, K, E].
// Ids outside [0, P) are skipped when writing and read as zeros.
struct PageCopyParams {
  PageLayout layout;
  void* pages;              // [L, P, K, E]
  void* buffer;             // [n, L, K, E], device memory
  const int32_t* page_ids;  // [n]
  int64_t num_layers;
  int64_t num_pages;
  int count;  // n
};

}  // namespace directkv

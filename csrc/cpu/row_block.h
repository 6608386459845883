// What the planner hands to the instruction-set specific kernels: one block of query rows, the same
// for some neighbouring KV heads, and the tokens it attends to. Plain data only: the translation
// units behind it are compiled with different -m flags, so they share no inline function with the
// rest of the program (the linker would keep one copy, possibly the one this machine cannot run).
#pragma once

#include <cstdint>

#include "../page_layout.h"

namespace directkv::cpu {

constexpr int kMaxBlockRows = 64;  // over all heads of the block
constexpr int kMaxHeadDim = 512;
// Accumulators of 32 KiB at most: with the queries they stay in any L2.
constexpr int kMaxBlockElements = 8192;

struct RowBlock {
  DType dtype;
  int head_dim;
  float scale;
  float soft_cap;  // > 0 or off

  // Neighbouring KV heads of a page are neighbours in memory. Taking them in turn, page by page,
  // reads one long run; one head at a time would jump from tile to tile, at half the bandwidth.
  int heads;
  int rows;                            // per head; heads * rows <= kMaxBlockRows
  const void* query[kMaxBlockRows];    // [heads][rows] pointers to [H]
  int64_t first[kMaxBlockRows];        // [rows] first position a row may see (window); <= 0: all
  int64_t fresh_first[kMaxBlockRows];  // [rows] fresh tokens [fresh_first, fresh_last) it may see
  int64_t fresh_last[kMaxBlockRows];

  // Cached tokens [token_begin, token_end) of the row, in pages of `page_size`.
  const char* tiles;          // tile of this layer and the first head in page 0
  int64_t head_stride;        // bytes from one head's tile to the next head's
  int64_t page_stride;        // bytes from one page's tile to the next page's
  const int32_t* page_table;  // every id needed has been checked
  int page_size;
  int64_t row_stride;    // bytes from one token's keys to the next token's
  int64_t value_offset;  // bytes from a tile's first key row to its first value row
  int64_t token_begin;
  int64_t token_end;

  // Fresh tokens [0, fresh_tokens); 0: none.
  const char* fresh_key;
  const char* fresh_value;
  int64_t fresh_stride;       // bytes from token to token
  int64_t fresh_head_stride;  // bytes from head to head
  int64_t fresh_tokens;

  // Results, [heads][rows]: softmax_state.h's (m, l, o).
  float m[kMaxBlockRows];
  float l[kMaxBlockRows];
  float* o[kMaxBlockRows];  // [H] each, written whole
};

using AttendRowsFn = void (*)(RowBlock& block);

struct IsaKernel {
  const char* name;
  AttendRowsFn attend_rows;
};

// Null where the compiler or the architecture does not have it. The baseline is always there and is
// called "neon" on 64-bit Arm, whose default flags include it.
const IsaKernel* baseline_kernel();
const IsaKernel* avx2_kernel();
const IsaKernel* avx512_kernel();
const IsaKernel* avx512bf16_kernel();

}  // namespace directkv::cpu

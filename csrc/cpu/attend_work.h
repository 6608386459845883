// How one attend call is cut into units for the threads. Arithmetic on lengths, no attention here.
#pragma once

#include <vector>

#include "../params.h"

namespace directkv::cpu {

// A unit is (row, split of its pages, block of KV heads, block of query rows).
struct RowWork {
  bool invalid = false;   // gives NaN
  int valid_queries = 0;  // of the T: those to write (NaN or a result)
  int64_t begin = 0;      // cached tokens [begin, end) some query may see
  int64_t end = 0;
  int fresh = 0;  // fresh tokens, all in the last split
  int splits = 1;
  int64_t split_tokens = 0;  // whole pages
  int blocks = 0;            // of query rows; 0: nothing to compute
  int block_rows = 0;        // query rows (of the G*T of a KV head) per block
  int block_heads = 0;       // KV heads per block
  int head_blocks = 0;
  int64_t first_unit = 0;
};

struct AttendWork {
  std::vector<RowWork> rows;  // [B]
  int64_t units = 0;
  int64_t bytes = 0;   // of keys and values that will be read
  bool merge = false;  // some row has several splits
};

// Pages [page_begin, page_end) of every row; `max_splits` is what the workspace has room for.
AttendWork plan_attend(const AttendParams& params, int page_begin, int page_end, bool with_fresh,
                       int threads, int max_splits);

struct Unit {
  int b;
  int split;
  int head_block;
  int block;
};
Unit locate_unit(const AttendWork& work, int64_t unit);

}  // namespace directkv::cpu

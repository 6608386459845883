#include "attend_work.h"

#include <algorithm>

#include "row_block.h"
#include "row_check.h"

namespace directkv::cpu {
namespace {

// Enough units that threads which start late or run slowly leave little idle time at the end.
constexpr int64_t kUnitsPerThread = 8;
// Below this a unit's own start and end (query unpacking, merge) are felt.
constexpr int64_t kMinUnitBytes = 256 * 1024;
// More query rows of one head than this are cut into blocks, each of which reads the tiles again.
constexpr int kMaxRowsPerHead = 32;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

RowWork inspect_row(const AttendParams& p, int b, int page_begin, int page_end, bool with_fresh) {
  const CacheView& cache = p.cache;
  const int64_t length = cache.lengths[b];
  const int seq = p.seq_lengths[b];
  RowWork row;
  if (seq < 0 || seq > p.query_tokens) {
    row.invalid = true;
    row.valid_queries = p.query_tokens;
    return row;
  }
  row.valid_queries = seq;
  if (seq == 0) return row;
  if (length < 0 || length > row_capacity(cache) || !layer_in_range(cache)) {
    row.invalid = true;
    return row;
  }
  // The leftmost token any query sees is query 0's.
  const int64_t window_begin = p.window_left >= 0 ? length - p.window_left : 0;
  const int64_t page_size = cache.layout.page_size;
  row.begin = std::max({int64_t{0}, window_begin, page_begin * page_size});
  row.end = std::max(row.begin, std::min(length, page_end * page_size));
  row.invalid = !pages_in_range(cache, b, row.begin, row.end);
  row.fresh = with_fresh && p.fresh_tokens > 0 ? seq : 0;
  return row;
}

int64_t pages_of(const RowWork& row, int64_t page_size) {
  return row.begin < row.end ? ceil_div(row.end, page_size) - row.begin / page_size : 0;
}

}  // namespace

AttendWork plan_attend(const AttendParams& p, int page_begin, int page_end, bool with_fresh,
                       int threads, int max_splits) {
  const PageLayout& layout = p.cache.layout;
  const int group = p.query_heads / layout.kv_heads;
  // In whole groups of 4, so that rounding a block up to them stays within the limit.
  const int max_rows = std::min(kMaxBlockRows, kMaxBlockElements / layout.head_dim) / 4 * 4;
  AttendWork work;
  work.rows.reserve(p.cache.batch);
  int64_t bytes_of_blocks = 0;
  for (int b = 0; b < p.cache.batch; ++b) {
    RowWork row = inspect_row(p, b, page_begin, page_end, with_fresh);
    if (!row.invalid && row.valid_queries > 0) {
      const int64_t query_rows = int64_t{row.valid_queries} * group;
      row.blocks = static_cast<int>(ceil_div(query_rows, std::min(max_rows, kMaxRowsPerHead)));
      row.block_rows = static_cast<int>(ceil_div(query_rows, row.blocks));
      if (row.blocks > 1) row.block_rows = static_cast<int>(ceil_div(row.block_rows, 4) * 4);
      row.blocks = static_cast<int>(ceil_div(query_rows, row.block_rows));
      row.block_heads = std::min(layout.kv_heads, std::max(1, max_rows / row.block_rows));
      bytes_of_blocks += pages_of(row, layout.page_size) * layout.page_bytes() * row.blocks;
      work.bytes += (row.end - row.begin + row.fresh) * layout.kv_heads * row.blocks * 2 *
                    layout.head_dim * itemsize(layout.dtype);
    }
    work.rows.push_back(row);
  }
  const int64_t wanted = threads > 1 ? kUnitsPerThread * threads : 1;
  const int64_t unit_bytes = std::max(ceil_div(bytes_of_blocks, wanted), kMinUnitBytes);
  for (RowWork& row : work.rows) {
    row.first_unit = work.units;
    if (row.blocks == 0) continue;
    const int64_t row_pages = std::max<int64_t>(1, pages_of(row, layout.page_size));
    // Split along the tokens first: blocks of few heads read short runs. Where the workspace does
    // not hold as many splits, split the heads too.
    const int64_t parts = threads > 1 ? ceil_div(row_pages * layout.page_bytes(), unit_bytes) : 1;
    const int64_t head_blocks = ceil_div(layout.kv_heads, row.block_heads);
    const int64_t splits = std::clamp<int64_t>(ceil_div(parts, head_blocks), 1,
                                               std::min<int64_t>(row_pages, max_splits));
    const int64_t split_pages = ceil_div(row_pages, splits);
    row.splits = static_cast<int>(ceil_div(row_pages, split_pages));
    row.split_tokens = split_pages * layout.page_size;
    row.block_heads = static_cast<int>(std::clamp<int64_t>(
        int64_t{layout.kv_heads} * row.splits / std::max<int64_t>(1, parts), 1, row.block_heads));
    row.head_blocks = static_cast<int>(ceil_div(layout.kv_heads, row.block_heads));
    work.merge |= row.splits > 1;
    work.units += int64_t{row.splits} * row.head_blocks * row.blocks;
  }
  return work;
}

Unit locate_unit(const AttendWork& work, int64_t unit) {
  // The last row that starts at or before the unit; rows without units share the next one's start.
  const auto after =
      std::upper_bound(work.rows.begin(), work.rows.end(), unit,
                       [](int64_t value, const RowWork& row) { return value < row.first_unit; });
  const int b = static_cast<int>(after - work.rows.begin()) - 1;
  const RowWork& row = work.rows[b];
  const int64_t local = unit - row.first_unit;
  Unit u;
  u.b = b;
  u.block = static_cast<int>(local % row.blocks);
  u.head_block = static_cast<int>(local / row.blocks % row.head_blocks);
  u.split = static_cast<int>(local / row.blocks / row.head_blocks);
  return u;
}

}  // namespace directkv::cpu

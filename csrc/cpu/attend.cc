// attend and attend_partial: units on the threads, then one merge of what was split.
#include <algorithm>
#include <cstring>

#include "../softmax_state.h"
#include "attend_plan.h"
#include "attend_work.h"
#include "convert.h"
#include "isa.h"
#include "kernels.h"
#include "parallel.h"
#include "row_check.h"

namespace directkv::cpu {
namespace {

// Waking a thread costs about as much as reading this much.
constexpr int64_t kSerialBytes = 128 * 1024;

// Partial states of one split, or of the whole call: [B, T, N] and [B, T, N, H].
struct States {
  float* m;
  float* l;
  float* o;
};

class Attend {
 public:
  // Results go to params.out and params.lse, or, where given, to `partial`.
  Attend(const AttendParams& params, const States* partial) : p_(params), partial_(partial) {}

  void run(int page_begin, int page_end, bool with_fresh, const Executor& executor) {
    const PageLayout& layout = p_.cache.layout;
    const int max_splits = p_.workspace
                               ? make_attend_plan(p_.cache.batch, p_.query_tokens, p_.query_heads,
                                                  layout.kv_heads, p_.cache.max_pages)
                                     .splits
                               : 1;
    const int threads = 1 + (executor.schedule ? std::max(0, executor.workers) : 0);
    work_ = plan_attend(p_, page_begin, page_end, with_fresh, threads, max_splits);
    fill_rows_without_result();
    static const Executor caller_only;
    const Executor& helpers = work_.bytes < kSerialBytes ? caller_only : executor;
    parallel_chunks(work_.units, helpers, [this](int64_t unit, int) { attend_unit(unit); });
    if (work_.merge) merge_splits(helpers);
  }

 private:
  int64_t heads() const { return p_.query_heads; }
  int64_t head_dim() const { return p_.cache.layout.head_dim; }
  int64_t row_bytes() const { return head_dim() * itemsize(p_.cache.layout.dtype); }

  // Index in [B, T, N] of query head n of token t.
  int64_t index(int b, int64_t t, int64_t n) const {
    return (int64_t{b} * p_.query_tokens + t) * heads() + n;
  }

  States split_states(int split) const {
    const int64_t rows = int64_t{p_.cache.batch} * p_.query_tokens * heads();
    float* base = static_cast<float*>(p_.workspace) + split * rows * (head_dim() + 2);
    return {base, base + rows, base + 2 * rows};
  }

  void write_result(int64_t at, SoftmaxState s, const float* o) const {
    if (partial_) {
      partial_->m[at] = s.m;
      partial_->l[at] = s.l;
      if (o != partial_->o + at * head_dim()) {
        std::memcpy(partial_->o + at * head_dim(), o, head_dim() * sizeof(float));
      }
      return;
    }
    p_.lse[at] = logsumexp(s);
    write_scaled(p_.cache.layout.dtype, o, inverse_sum(s), head_dim(),
                 static_cast<char*>(p_.out) + at * row_bytes());
  }

  // Queries [begin, end) of row b, all heads: empty, or NaN for a row that cannot be served.
  void fill(int b, int begin, int end, bool nan) const {
    const int64_t at = index(b, begin, 0), n = (end - begin) * heads();
    if (n <= 0) return;
    if (partial_) {
      std::fill_n(partial_->m + at, n, nan ? NAN : -INFINITY);
      std::fill_n(partial_->l + at, n, nan ? NAN : 0.0f);
      std::fill_n(partial_->o + at * head_dim(), n * head_dim(), nan ? NAN : 0.0f);
      return;
    }
    std::fill_n(p_.lse + at, n, nan ? NAN : -INFINITY);
    char* out = static_cast<char*>(p_.out) + at * row_bytes();
    if (nan) {
      fill_nan(p_.cache.layout.dtype, n * head_dim(), out);
    } else {
      std::memset(out, 0, n * row_bytes());
    }
  }

  void fill_rows_without_result() const {
    for (int b = 0; b < p_.cache.batch; ++b) {
      const RowWork& row = work_.rows[b];
      if (row.invalid) fill(b, 0, row.valid_queries, true);
      fill(b, row.valid_queries, p_.query_tokens, false);
    }
  }

  void attend_unit(int64_t unit_index) const {
    const Unit unit = locate_unit(work_, unit_index);
    const RowWork& row = work_.rows[unit.b];
    const int group = p_.query_heads / p_.cache.layout.kv_heads;
    RowBlock block;
    set_tokens(unit, row, &block);

    alignas(64) float local[kMaxBlockElements];
    const bool split = row.splits > 1;
    const bool to_local = !split && !partial_;
    const States states = split ? split_states(unit.split) : partial_ ? *partial_ : States{};
    const int64_t row0 = int64_t{unit.block} * row.block_rows;
    const int head0 = unit.head_block * row.block_heads;
    block.heads = std::min(row.block_heads, p_.cache.layout.kv_heads - head0);
    block.rows = static_cast<int>(
        std::min<int64_t>(row.block_rows, int64_t{row.valid_queries} * group - row0));
    for (int i = 0; i < block.rows; ++i) {
      const int64_t t = (row0 + i) / group;
      const bool window = p_.window_left >= 0;
      block.first[i] = window ? p_.cache.lengths[unit.b] + t - p_.window_left : 0;
      block.fresh_first[i] = window ? t - p_.window_left : 0;
      block.fresh_last[i] = t + 1;
    }
    const int rows = block.heads * block.rows;
    int64_t at[kMaxBlockRows];
    for (int i = 0; i < rows; ++i) {
      const int64_t in_head = row0 + i % block.rows;
      at[i] =
          index(unit.b, in_head / group, int64_t{head0 + i / block.rows} * group + in_head % group);
      block.query[i] = static_cast<const char*>(p_.query) + at[i] * row_bytes();
      block.o[i] = to_local ? local + i * head_dim() : states.o + at[i] * head_dim();
    }
    active_kernel().attend_rows(block);
    for (int i = 0; i < rows; ++i) {
      if (to_local) {
        write_result(at[i], {block.m[i], block.l[i]}, block.o[i]);
      } else {
        states.m[at[i]] = block.m[i];
        states.l[at[i]] = block.l[i];
      }
    }
  }

  void set_tokens(const Unit& unit, const RowWork& row, RowBlock* block) const {
    const CacheView& cache = p_.cache;
    const PageLayout& layout = cache.layout;
    const int head0 = unit.head_block * row.block_heads;
    block->dtype = layout.dtype;
    block->head_dim = layout.head_dim;
    block->scale = p_.scale;
    block->soft_cap = p_.soft_cap;
    block->tiles = static_cast<const char*>(cache.pages) +
                   layout.tile_offset(*cache.layer, cache.num_pages, 0, head0);
    block->head_stride = layout.tile_bytes();
    block->page_stride = layout.page_bytes();
    block->page_table = cache.page_table + int64_t{unit.b} * cache.max_pages;
    block->page_size = layout.page_size;
    block->row_stride = (layout.key_row(1) - layout.key_row(0)) * itemsize(layout.dtype);
    block->value_offset = (layout.value_row(0) - layout.key_row(0)) * itemsize(layout.dtype);
    // Splits are cut at page borders.
    const int64_t first_page_start = row.begin / layout.page_size * layout.page_size;
    const int64_t split_start = first_page_start + unit.split * row.split_tokens;
    block->token_begin = std::max(row.begin, split_start);
    block->token_end = std::min(row.end, split_start + row.split_tokens);
    const int64_t fresh_offset =
        (int64_t{unit.b} * p_.fresh_tokens * layout.kv_heads + head0) * row_bytes();
    block->fresh_tokens = unit.split == row.splits - 1 ? row.fresh : 0;
    block->fresh_stride = layout.kv_heads * row_bytes();
    block->fresh_head_stride = row_bytes();
    block->fresh_key = static_cast<const char*>(p_.key) + (row.fresh ? fresh_offset : 0);
    block->fresh_value = static_cast<const char*>(p_.value) + (row.fresh ? fresh_offset : 0);
  }

  void merge_splits(const Executor& executor) const {
    // One chunk per KV head of a (row, query): small enough to share one decode step's merge.
    const int kv_heads = p_.cache.layout.kv_heads;
    const int group = p_.query_heads / kv_heads;
    const int64_t chunks = int64_t{p_.cache.batch} * p_.query_tokens * kv_heads;
    int64_t elements = 0;
    for (const RowWork& row : work_.rows) {
      if (row.splits > 1) elements += row.splits * row.valid_queries * heads() * head_dim();
    }
    const bool small = elements * 4 < kSerialBytes;
    parallel_chunks(chunks, small ? Executor{} : executor, [&](int64_t chunk, int) {
      const int b = static_cast<int>(chunk / kv_heads / p_.query_tokens);
      const int64_t t = chunk / kv_heads % p_.query_tokens;
      const RowWork& row = work_.rows[b];
      if (row.splits < 2 || t >= row.valid_queries) return;
      const int64_t n = chunk % kv_heads * group;
      for (int64_t i = 0; i < group; ++i) merge_row(row.splits, index(b, t, n + i));
    });
  }

  // Into split 0's place, or the caller's partial state.
  void merge_row(int splits, int64_t at) const {
    SoftmaxState total = empty_state();
    for (int s = 0; s < splits; ++s) total.m = max_keep_nan(split_states(s).m[at], total.m);
    float* o = partial_ ? partial_->o + at * head_dim() : split_states(0).o + at * head_dim();
    for (int s = 0; s < splits; ++s) {
      const States part = split_states(s);
      const float factor = rescale(part.m[at], total.m);
      const float* from = part.o + at * head_dim();
      // A split that saw nothing is skipped: its factor is 0 and its o is 0.
      total.l += part.l[at] * factor;
      for (int64_t i = 0; i < head_dim(); ++i) {
        o[i] = s == 0 ? from[i] * factor : o[i] + from[i] * factor;
      }
    }
    write_result(at, total, o);
  }

  const AttendParams& p_;
  const States* partial_;
  AttendWork work_;
};

}  // namespace

void attend(const AttendParams& params, const Executor& executor) {
  Attend(params, nullptr).run(0, params.cache.max_pages, true, executor);
}

void attend_partial(const AttendParams& params, int page_begin, int page_end, bool with_fresh,
                    float* m, float* l, float* o, const Executor& executor) {
  const States partial = {m, l, o};
  Attend(params, &partial)
      .run(std::max(0, page_begin), std::min(page_end, params.cache.max_pages), with_fresh,
           executor);
}

}  // namespace directkv::cpu

#include "attend_case.h"

#include <algorithm>
#include <cstdio>
#include <numeric>

#include "../../csrc/cpu/attend_plan.h"
#include "../../csrc/cuda/chunk_plan.h"

namespace directkv::test {

std::string Shape::text() const {
  char s[256];
  std::snprintf(s, sizeof(s),
                "dtype=%d B=%d T=%d K=%d G=%d H=%d page=%d max_pages=%d fresh=%d cap=%g window=%d",
                static_cast<int>(dtype), batch, query_tokens, kv_heads, group, head_dim, page_size,
                max_pages, fresh, soft_cap, window_left);
  return s;
}

AttendCase::AttendCase(const Shape& s, std::vector<int> row_lengths, std::vector<int> row_seq,
                       uint32_t seed)
    : shape(s),
      pool_pages(int64_t{s.batch} * s.max_pages + 3),
      layer(s.layer),
      lengths(row_lengths.begin(), row_lengths.end()),
      seq_lengths(row_seq.begin(), row_seq.end()) {
  std::mt19937 rng(seed);
  std::normal_distribution<double> normal;
  const int64_t item = itemsize(s.dtype);
  auto random = [&](std::vector<char>& array, int64_t n) {
    array.resize(n * item);
    for (int64_t i = 0; i < n; ++i) encode(s.dtype, array.data(), i, normal(rng));
  };
  const int64_t token_elements = int64_t{s.batch} * s.query_tokens * s.head_dim;
  random(query, token_elements * s.heads());
  random(key, s.fresh ? token_elements * s.kv_heads : 0);
  random(value, s.fresh ? token_elements * s.kv_heads : 0);

  std::vector<int32_t> ids(pool_pages);
  std::iota(ids.begin(), ids.end(), 0);
  std::shuffle(ids.begin(), ids.end(), rng);
  page_table.assign(ids.begin(), ids.begin() + int64_t{s.batch} * s.max_pages);
  const int64_t pool_elements = s.layers * pool_pages * s.kv_heads * 2 * s.page_size * s.head_dim;
  pages.resize(pool_elements * item);
  for (int64_t i = 0; i < pool_elements; ++i) encode(s.dtype, pages.data(), i, NAN);
  for (int b = 0; b < s.batch; ++b) {
    const int length = std::clamp(lengths[b], 0, s.capacity());
    for (int t = 0; t < length; ++t)
      for (int k = 0; k < s.kv_heads; ++k)
        for (int h = 0; h < 2 * s.head_dim; ++h)
          encode(s.dtype, pages.data(), cached(b, t, k, h % s.head_dim, h >= s.head_dim),
                 normal(rng));
    for (int p = (length + s.page_size - 1) / s.page_size; p < s.max_pages; ++p)
      page_table[int64_t{b} * s.max_pages + p] = p % 2 ? -1 : 1 << 30;
  }
  out.resize(token_elements * s.heads() * item);
  lse.resize(int64_t{s.batch} * s.query_tokens * s.heads());
  workspace.resize(
      std::max(cpu::attend_workspace_bytes(s.batch, s.query_tokens, s.heads(), s.kv_heads,
                                           s.head_dim, s.max_pages),
               cuda::workspace_bytes(itemsize(s.dtype), s.batch, s.query_tokens, s.heads(),
                                     s.kv_heads, s.head_dim, s.page_size, s.max_pages, true)) /
      4);
  poison_outputs();
}

int64_t AttendCase::cached(int b, int s, int k, int h, bool value) const {
  const int64_t page = page_table[int64_t{b} * shape.max_pages + s / shape.page_size];
  const int64_t tile = (shape.layer * pool_pages + page) * shape.kv_heads + k;
  const int64_t row = (value ? shape.page_size : 0) + s % shape.page_size;
  return (tile * 2 * shape.page_size + row) * shape.head_dim + h;
}

void AttendCase::poison_outputs() {
  for (int64_t i = 0; i * itemsize(shape.dtype) < static_cast<int64_t>(out.size()); ++i)
    encode(shape.dtype, out.data(), i, 12345.0);
  std::fill(lse.begin(), lse.end(), 12345.0f);
  std::fill(workspace.begin(), workspace.end(), NAN);
}

AttendParams AttendCase::params() {
  AttendParams p = {};
  p.cache = {{shape.dtype, shape.page_size, shape.kv_heads, shape.head_dim},
             pages.data(),
             shape.layers,
             pool_pages,
             page_table.data(),
             lengths.data(),
             &layer,
             shape.batch,
             shape.max_pages};
  p.query = query.data();
  p.key = key.data();
  p.value = value.data();
  p.seq_lengths = seq_lengths.data();
  p.out = out.data();
  p.lse = lse.data();
  p.workspace = workspace.data();
  p.query_tokens = shape.query_tokens;
  p.fresh_tokens = shape.fresh ? shape.query_tokens : 0;
  p.query_heads = shape.heads();
  p.scale =
      shape.scale != 0.0f ? shape.scale : 1.0f / std::sqrt(static_cast<float>(shape.head_dim));
  p.soft_cap = shape.soft_cap;
  p.window_left = shape.window_left;
  return p;
}

namespace {

// What the queries of a row may see of a KV head, decoded once.
struct Seen {
  Seen(const AttendCase& c, int b, int k, int page_begin, int page_end, bool with_fresh)
      : width(c.shape.head_dim) {
    const Shape& s = c.shape;
    const int length = c.lengths[b];
    const int first = s.window_left >= 0 ? std::max(0, length - s.window_left) : 0;
    const auto add = [&](int pos, const void* from, int64_t key, const void* also, int64_t value) {
      position.push_back(pos);
      for (int h = 0; h < width; ++h) {
        keys.push_back(decode(s.dtype, from, key + h));
        values.push_back(decode(s.dtype, also, value + h));
      }
    };
    for (int pos = first; pos < length; ++pos) {
      if (pos / s.page_size < page_begin || pos / s.page_size >= page_end) continue;
      const void* const pages = c.pages.data();
      add(pos, pages, c.cached(b, pos, k, 0, false), pages, c.cached(b, pos, k, 0, true));
    }
    if (!s.fresh || !with_fresh) return;
    for (int t = 0; t < c.seq_lengths[b]; ++t) {
      const int64_t at = ((int64_t{b} * s.query_tokens + t) * s.kv_heads + k) * width;
      add(length + t, c.key.data(), at, c.value.data(), at);
    }
  }

  int width;
  std::vector<int> position;         // in the row, of a token
  std::vector<double> keys, values;  // [tokens, H]
};

double dot(const double* a, const double* b, int n) {
  double sums[8] = {};  // side by side, so that the compiler adds them at once
  for (int i = 0; i < n; ++i) sums[i % 8] += a[i] * b[i];
  return std::accumulate(sums, sums + 8, 0.0);
}

// One query: row `at` of the results.
void attend_one(const Shape& s, const double* query, const Seen& seen, int first, int last,
                int64_t at, OracleResult* r) {
  const int H = s.head_dim;
  const double scale = s.scale != 0.0f ? s.scale : 1.0f / std::sqrt(static_cast<float>(H));
  std::vector<double> logits;
  std::vector<size_t> tokens;
  for (size_t i = 0; i < seen.position.size(); ++i) {
    if (seen.position[i] < first || seen.position[i] > last) continue;
    double logit = dot(query, seen.keys.data() + i * H, H) * scale;
    if (s.soft_cap > 0.0f) logit = s.soft_cap * std::tanh(logit / s.soft_cap);
    logits.push_back(logit);
    tokens.push_back(i);
  }
  if (logits.empty()) return;
  double m = -INFINITY;
  for (double x : logits) m = std::isnan(x) || std::isnan(m) ? NAN : std::max(m, x);
  r->m[at] = m;
  double* const o = r->o.data() + at * H;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double p = std::exp(logits[i] - m);
    const double* const value = seen.values.data() + tokens[i] * H;
    r->l[at] += p;
    for (int h = 0; h < H; ++h) o[h] += p * value[h];
  }
  r->lse[at] = m + std::log(r->l[at]);
  for (int h = 0; h < H; ++h) r->out[at * H + h] = o[h] / r->l[at];
}

}  // namespace

OracleResult oracle(const AttendCase& c, int page_begin, int page_end, bool with_fresh) {
  const Shape& s = c.shape;
  const int T = s.query_tokens, N = s.heads(), H = s.head_dim;
  const int64_t rows = int64_t{s.batch} * T * N;
  OracleResult r;
  r.out.assign(rows * H, 0.0);
  r.o.assign(rows * H, 0.0);
  r.l.assign(rows, 0.0);
  r.m.assign(rows, -INFINITY);
  r.lse.assign(rows, -INFINITY);
  for (int b = 0; b < s.batch; ++b) {
    if (c.seq_lengths[b] <= 0) continue;
    for (int k = 0; k < s.kv_heads; ++k) {
      const Seen seen(c, b, k, page_begin, page_end, with_fresh);
      for (int t = 0; t < c.seq_lengths[b]; ++t)
        for (int n = k * s.group; n < (k + 1) * s.group; ++n) {
          const int64_t at = (int64_t{b} * T + t) * N + n;
          std::vector<double> query(H);
          for (int h = 0; h < H; ++h) query[h] = decode(s.dtype, c.query.data(), at * H + h);
          const int last = c.lengths[b] + t;
          const int first = s.window_left >= 0 ? last - s.window_left : 0;
          attend_one(s, query.data(), seen, first, last, at, &r);
        }
    }
  }
  return r;
}

double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (std::isnan(a[i]) && std::isnan(b[i])) continue;
    if (a[i] == b[i]) {
      if (!std::isinf(b[i])) norm += b[i] * b[i];
      continue;
    }
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return difference == 0.0 ? 0.0 : std::sqrt(difference / norm);
}

double tolerance(DType dtype) {
  return dtype == DType::kF32 ? 1.5e-6 : dtype == DType::kBF16 ? 4e-3 : 5e-4;
}

std::vector<double> outputs(const AttendCase& c) {
  std::vector<double> out(c.out.size() / itemsize(c.shape.dtype));
  for (size_t i = 0; i < out.size(); ++i) out[i] = c.out_at(i);
  return out;
}

double lse_gap(const AttendCase& c, const std::vector<double>& want) {
  double gap = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double a = c.lse[i], b = want[i];
    if (a == b || (std::isnan(a) && std::isnan(b))) continue;
    if (!std::isfinite(a) || !std::isfinite(b)) return INFINITY;
    gap = std::max(gap, std::fabs(a - b));
  }
  return gap;
}

}  // namespace directkv::test

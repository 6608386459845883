// attend and attend_partial of every instruction set this machine runs, against the oracle.
#include <algorithm>
#include <memory>

#include "../../csrc/cpu/isa.h"
#include "../../csrc/cpu/kernels.h"
#include "../../csrc/softmax_state.h"
#include "attend_case.h"
#include "check.h"
#include "thread_pool.h"

namespace directkv::test {
namespace {

ThreadPool& pool() {
  static ThreadPool threads(3);
  return threads;
}

template <typename Fn>
void for_every_isa(Fn fn) {
  const char* chosen = cpu::isa_name();
  for (const cpu::IsaKernel* kernel : cpu::available_kernels()) {
    cpu::select_kernel(kernel->name);
    fn(kernel->name);
  }
  cpu::select_kernel(chosen);
}

std::vector<double> doubles(const std::vector<float>& v) { return {v.begin(), v.end()}; }

// lse is a logarithm: compared absolutely.
double largest_gap(const std::vector<double>& a, const std::vector<double>& b) {
  double gap = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]))) continue;
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    gap = std::max(gap, std::fabs(a[i] - b[i]));
  }
  return gap;
}

double lse_tolerance(DType dtype) { return dtype == DType::kBF16 ? 4e-3 : 2e-5; }

void check_attend(AttendCase& c, const OracleResult& want, const char* isa) {
  for (const cpu::Executor& executor : {cpu::Executor{}, pool().executor()}) {
    c.poison_outputs();
    cpu::attend(c.params(), executor);
    const double error = relative_error(outputs(c), want.out);
    CHECK(error <= tolerance(c.shape.dtype), "%s workers=%d error %.3g: %s", isa, executor.workers,
          error, c.shape.text().c_str());
    const double gap = largest_gap(doubles(c.lse), want.lse);
    CHECK(gap <= lse_tolerance(c.shape.dtype), "%s workers=%d lse gap %.3g: %s", isa,
          executor.workers, gap, c.shape.text().c_str());
  }
}

void check_everywhere(AttendCase& c) {
  const OracleResult want = oracle(c, 0, c.shape.max_pages, true);
  for_every_isa([&](const char* isa) { check_attend(c, want, isa); });
}

template <typename T, size_t n>
T pick(std::mt19937& rng, const T (&from)[n]) {
  return from[rng() % n];
}

AttendCase random_case(uint32_t seed) {
  std::mt19937 rng(seed);
  Shape s;
  s.dtype = pick(rng, {DType::kBF16, DType::kF16, DType::kF32});
  s.head_dim = pick(rng, {8, 16, 24, 64, 72, 80, 96, 128, 256, 512});
  s.group = pick(rng, {1, 2, 3, 4, 5, 7, 8, 16});
  s.query_tokens = pick(rng, {1, 1, 2, 5, 33});
  s.kv_heads = pick(rng, {1, 2, 3});
  s.batch = pick(rng, {1, 2, 3});
  s.page_size = pick(rng, {16, 32, 64, 80, 128});
  s.max_pages = 1 + rng() % (s.head_dim > 100 ? 4 : 9);
  s.fresh = rng() % 4 != 0;
  s.soft_cap = rng() % 3 ? 0.0f : pick(rng, {1.0f, 5.0f, 30.0f});
  s.window_left = rng() % 2 ? -1 : pick(rng, {0, 1, 7, 33, 100});
  std::vector<int> lengths, seq;
  for (int b = 0; b < s.batch; ++b) {
    const int capacity = s.capacity();
    const int choices[] = {0,
                           1,
                           capacity,
                           capacity - 1,
                           static_cast<int>(rng() % (capacity + 1)),
                           static_cast<int>(rng() % (capacity + 1))};
    lengths.push_back(pick(rng, choices));
    const int T = s.query_tokens;
    seq.push_back(rng() % 3 ? T : static_cast<int>(rng() % (T + 1)));
  }
  return AttendCase(s, lengths, seq, seed);
}

TEST(attend_random_shapes) {
  for (int seed = 1; seed <= share_of(250); ++seed) {
    AttendCase c = random_case(seed);
    check_everywhere(c);
  }
}

TEST(attend_every_head_dim_and_dtype) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (int head_dim : {8, 16, 64, 80, 96, 128, 256, 512})
      for (int group : {1, 4}) {
        Shape s;
        s.dtype = dtype;
        s.head_dim = head_dim;
        s.group = group;
        s.kv_heads = 2;
        s.batch = 2;
        s.page_size = 64;
        s.max_pages = 8;
        AttendCase c(s, {511, 67}, {1, 1}, 77);
        check_everywhere(c);
      }
}

// Head dims that are not powers of two leave the least room in a block of query rows.
TEST(attend_full_blocks) {
  for (int head_dim : {136, 264, 488})
    for (int group : {1, 3, 11, 16}) {
      Shape s;
      s.dtype = DType::kBF16;
      s.head_dim = head_dim;
      s.group = group;
      s.kv_heads = 24;
      s.query_tokens = group == 1 ? 62 : 6;
      s.max_pages = 1;
      s.layers = 2;
      AttendCase c(s, {9}, {s.query_tokens}, 31);
      check_everywhere(c);
    }
}

TEST(attend_partial_merges_to_whole) {
  for (int seed = 1000; seed < 1000 + share_of(60); ++seed) {
    AttendCase c = random_case(seed);
    const OracleResult want = oracle(c, 0, c.shape.max_pages, true);
    const int cut = static_cast<int>(seed % (c.shape.max_pages + 1));
    const int H = c.shape.head_dim;
    const size_t rows = c.lse.size();
    for_every_isa([&](const char* isa) {
      std::vector<float> m[2], l[2], o[2];
      for (int part = 0; part < 2; ++part) {
        m[part].assign(rows, 12345.0f);
        l[part].assign(rows, 12345.0f);
        o[part].assign(rows * H, 12345.0f);
        std::fill(c.workspace.begin(), c.workspace.end(), NAN);
        const int begin = part ? cut : 0, end = part ? c.shape.max_pages : cut;
        cpu::attend_partial(c.params(), begin, end, part == 0, m[part].data(), l[part].data(),
                            o[part].data(), pool().executor());
        const OracleResult piece = oracle(c, begin, end, part == 0);
        CHECK(largest_gap(doubles(m[part]), piece.m) < 1e-4, "%s m: %s", isa,
              c.shape.text().c_str());
        CHECK(relative_error(doubles(l[part]), piece.l) <= tolerance(c.shape.dtype), "%s l: %s",
              isa, c.shape.text().c_str());
        CHECK(relative_error(doubles(o[part]), piece.o) <= tolerance(c.shape.dtype), "%s o: %s",
              isa, c.shape.text().c_str());
      }
      std::vector<double> out(rows * H);
      for (size_t i = 0; i < rows; ++i) {
        const float top = max_keep_nan(m[0][i], m[1][i]);
        const float f0 = rescale(m[0][i], top), f1 = rescale(m[1][i], top);
        const SoftmaxState total = {top, l[0][i] * f0 + l[1][i] * f1};
        for (int h = 0; h < H; ++h)
          out[i * H + h] = (o[0][i * H + h] * f0 + o[1][i * H + h] * f1) * inverse_sum(total);
      }
      CHECK(relative_error(out, want.out) <= tolerance(c.shape.dtype), "%s merged: %s", isa,
            c.shape.text().c_str());
    });
  }
}

// Rows that cannot be served give NaN, their neighbours are untouched by it.
TEST(attend_invalid_rows) {
  Shape s;
  s.batch = 8;
  s.query_tokens = 2;
  s.group = 2;
  s.max_pages = 3;
  const std::vector<int> lengths = {40, -1, 49, 40, 40, 40, 40, 10};
  const std::vector<int> seq = {2, 1, 2, 3, -1, 1, 2, 0};
  const std::vector<bool> nan = {false, true, true, true, true, true, true, false};
  for_every_isa([&](const char* isa) {
    AttendCase c(s, lengths, seq, 5);
    c.page_table[5 * 3 + 0] = static_cast<int32_t>(c.pool_pages);
    c.page_table[6 * 3 + 2] = -1;
    cpu::attend(c.params(), pool().executor());
    AttendCase sane(s, {40, 0, 0, 0, 0, 0, 0, 10}, {2, 0, 0, 0, 0, 0, 0, 0}, 5);
    for (int b = 0; b < s.batch; ++b)
      for (int t = 0; t < 2; ++t)
        for (int n = 0; n < 2; ++n) {
          const int64_t at = (b * 2 + t) * 2 + n;
          const bool queried = t < seq[b] || seq[b] < 0 || seq[b] > 2;
          const bool is_nan = std::isnan(c.lse[at]) && std::isnan(c.out_at(at * s.head_dim));
          CHECK(is_nan == (nan[b] && queried), "%s row %d query %d", isa, b, t);
          if (!queried)
            CHECK(c.lse[at] == -INFINITY && c.out_at(at * 64) == 0, "%s row %d", isa, b);
        }
    for (int32_t layer : {-1, 2}) {
      c.layer = layer;
      cpu::attend(c.params(), pool().executor());
      CHECK(std::isnan(c.lse[0]) && c.lse[7 * 4] == -INFINITY, "%s layer %d", isa, layer);
    }
  });
}

// Pages left of every query's window are neither looked up nor read.
TEST(attend_window_skips_bad_pages) {
  Shape s;
  s.max_pages = 6;
  s.window_left = 20;
  AttendCase c(s, {90}, {1}, 3);
  for (int p = 0; p < 4; ++p) c.page_table[p] = -7;
  check_everywhere(c);
}

// A NaN in a token reaches the queries that see it and no other.
TEST(attend_nan_in_data_propagates) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (bool value : {false, true})
      for (int at : {0, 5, 44, 45}) {
        Shape s;
        s.dtype = dtype;
        s.query_tokens = 5;
        s.group = 3;
        s.window_left = 3;
        AttendCase c(s, {44}, {5}, 11);
        if (at < 44) {
          encode(dtype, c.pages.data(), c.cached(0, at == 5 ? 42 : at, 0, 3, value), NAN);
        } else {
          encode(dtype, value ? c.value.data() : c.key.data(), (at - 44) * 64 + 3, NAN);
        }
        check_everywhere(c);
      }
}

TEST(attend_extreme_logits) {
  for (DType dtype : {DType::kBF16, DType::kF16, DType::kF32})
    for (float scale : {1e-6f, 3.0f, -2.0f, 30.0f}) {
      Shape s;
      s.dtype = dtype;
      s.scale = scale;
      s.group = 4;
      s.max_pages = 5;
      AttendCase c(s, {70}, {1}, 19);
      const OracleResult want = oracle(c, 0, 5, true);
      // Logits of hundreds carry float32 rounding of the products into the exponent.
      const double slack = std::max(1.0, std::fabs(scale) * 64.0);
      for_every_isa([&](const char* isa) {
        cpu::attend(c.params(), pool().executor());
        const double error = relative_error(outputs(c), want.out);
        CHECK(error <= tolerance(dtype) * (dtype == DType::kF32 ? slack : 1.5),
              "%s scale %g error %g", isa, scale, error);
      });
    }
}

TEST(attend_nothing_to_do) {
  Shape s;
  s.batch = 0;
  AttendCase none(s, {}, {}, 1);
  cpu::attend(none.params(), pool().executor());
  s.batch = 1;
  s.query_tokens = 0;
  AttendCase no_queries(s, {5}, {0}, 1);
  cpu::attend(no_queries.params(), pool().executor());
  s.query_tokens = 3;
  s.fresh = false;
  s.window_left = 0;  // query 1 and 2 stand beyond all cached tokens
  AttendCase empty(s, {17}, {3}, 1);
  check_everywhere(empty);
}

TEST(attend_without_workspace) {
  AttendCase c = random_case(4321);
  const OracleResult want = oracle(c, 0, c.shape.max_pages, true);
  AttendParams p = c.params();
  p.workspace = nullptr;
  cpu::attend(p, pool().executor());
  CHECK(relative_error(outputs(c), want.out) <= tolerance(c.shape.dtype), "no workspace");
}

TEST(isa_names) {
  CHECK(!cpu::select_kernel("no such thing"), "unknown names are refused");
  bool listed = false;
  for (const cpu::IsaKernel* kernel : cpu::available_kernels())
    listed |= std::string(kernel->name) == cpu::isa_name();
  CHECK(listed, "%s", cpu::isa_name());
  std::printf("  built: %s; active: %s\n", cpu::isa_list(), cpu::isa_name());
}

}  // namespace
}  // namespace directkv::test

// attend: all dtypes, head dims, group sizes, new tokens, windows, caps, placements.
#include <cmath>
#include <random>

#include "../../csrc/cuda/kernels.h"
#include "check.h"
#include "cuda_device_case.h"
#if defined(DIRECTKV_EMULATE_CUDA)
#include "cuda_emulation.h"
#endif

namespace directkv::test {
namespace {

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};
constexpr int kHeadDims[] = {64, 80, 96, 128, 256};

template <typename T, size_t n>
T pick(std::mt19937& rng, const T (&from)[n]) {
  return from[rng() % n];
}

// `slack` multiplies the tolerance where logits are large.
void check_attend(AttendCase& c, Placement placement, double slack = 1.0) {
  const OracleResult want = oracle(c, 0, c.shape.max_pages, true);
  DeviceCase device(c, placement);
  device.attend();
  const double error = relative_error(outputs(c), want.out);
  CHECK(error <= slack * tolerance(c.shape.dtype), "%s error %.3g: %s", name(placement), error,
        c.shape.text().c_str());
  const double gap = lse_gap(c, want.lse);
  CHECK(gap <= slack * 2e-5, "%s lse gap %.3g: %s", name(placement), gap, c.shape.text().c_str());
}

// Also in the orders of threads and copies that the emulation offers.
void check_everywhere(AttendCase& c) {
  for (Placement placement : placements()) check_attend(c, placement);
#if defined(DIRECTKV_EMULATE_CUDA)
  for (const emulation::Options& options :
       {emulation::Options{true, false, 0}, emulation::Options{false, true, 1}}) {
    emulation::options() = options;
    check_attend(c, Placement::kDevice);
  }
  emulation::options() = {};
#endif
}

AttendCase random_case(uint32_t seed, DType dtype, int head_dim) {
  std::mt19937 rng(seed);
  Shape s;
  s.dtype = dtype;
  s.head_dim = head_dim;
  s.group = pick(rng, {1, 3, 4, 7, 8, 16});
  s.query_tokens = quick() ? pick(rng, {1, 2, 5}) : pick(rng, {1, 2, 5, 8, 33});
  s.kv_heads = pick(rng, {1, 2, 3});
  s.batch = pick(rng, {1, 2, 3});
  s.page_size = pick(rng, {16, 32, 64, 80});
  s.max_pages = 1 + rng() % (quick() ? 3 : 9);
  s.fresh = rng() % 4 != 0;
  s.soft_cap = rng() % 3 ? 0.0f : pick(rng, {1.0f, 5.0f, 30.0f});
  s.window_left = rng() % 2 ? -1 : pick(rng, {0, 1, 7, 33, 100});
  s.num_ctas = pick(rng, {0, 0, 1, 2, 3, 7, 300});
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
    seq.push_back(rng() % 3 ? s.query_tokens : static_cast<int>(rng() % (s.query_tokens + 1)));
  }
  return AttendCase(s, lengths, seq, seed);
}

TEST(attend_random_shapes) {
  uint32_t seed = 1;
  for (int round = 0; round < (quick() ? 1 : 12); ++round)
    for (DType dtype : kDTypes)
      for (int head_dim : kHeadDims) {
        AttendCase c = random_case(seed++, dtype, head_dim);
        check_everywhere(c);
      }
}

// Every compiled instance: the row classes are up to 16, 32, 64 and 128 rows, of float32 up to 4,
// 16 and 64; more rows than a class holds are cut into blocks.
TEST(attend_every_instance) {
  for (DType dtype : kDTypes)
    for (int head_dim : kHeadDims)
      for (int tokens : {1, 5, 9, 17, 33, 60}) {
        if (quick() && (tokens == 17 || tokens == 60)) continue;
        Shape s;
        s.dtype = dtype;
        s.head_dim = head_dim;
        s.group = 3;
        s.query_tokens = tokens;
        s.num_ctas = 5;
        s.batch = 2;
        s.kv_heads = 2;
        s.page_size = quick() ? 16 : 64;
        s.max_pages = 3;
        AttendCase c(s, {s.capacity() - tokens, s.page_size + 3}, {tokens, (tokens + 1) / 2},
                     100u + head_dim + tokens);
        check_attend(c, placements().back());
      }
}

TEST(attend_every_group_and_token_count) {
  if (quick()) return;
  for (int group : {1, 3, 4, 7, 8, 16})
    for (int tokens : {1, 2, 5, 8, 33}) {
      Shape s;
      s.dtype = DType::kBF16;
      s.head_dim = 128;
      s.group = group;
      s.query_tokens = tokens;
      s.kv_heads = 2;
      s.batch = 2;
      s.page_size = 64;
      s.max_pages = 5;
      AttendCase c(s, {279, 63}, {tokens, std::max(1, tokens - 1)}, 31u * group + tokens);
      check_attend(c, Placement::kDevice);
    }
}

// A unit cut between CTAs at every tile, between some, and at no place.
TEST(attend_any_number_of_ctas) {
  for (DType dtype : kDTypes)
    for (int ctas : {1, 2, 3, 5, 8, 13, 300}) {
      if (quick() && ctas == 5) break;
      Shape s;
      s.dtype = dtype;
      s.batch = 4;
      s.kv_heads = 2;
      s.group = 5;
      s.query_tokens = 2;
      s.page_size = 48;
      s.max_pages = quick() ? 5 : 20;
      s.num_ctas = ctas;
      AttendCase c(s, {s.capacity() - 2, 0, 3, s.capacity() / 2}, {2, 2, 1, 0}, 77);
      for (Placement placement : placements()) check_attend(c, placement);
    }
}

// Many short segments in one CTA, each over before the ring has gone round: what one segment leaves
// behind must not be overwritten by the next.
TEST(attend_many_segments_in_one_cta) {
  for (int head_dim : {64, 256}) {
    Shape s;
    s.dtype = DType::kBF16;
    s.head_dim = head_dim;
    s.batch = 6;
    s.kv_heads = 2;
    s.group = 4;
    s.page_size = 64;
    s.max_pages = 1;
    s.num_ctas = 1;
    AttendCase c(s, {50, 33, 63, 17, 40, 1}, {1, 1, 1, 1, 1, 1}, 91);
#if defined(DIRECTKV_EMULATE_CUDA)
    for (unsigned seed = 1; seed <= 4; ++seed) {
      emulation::options() = {false, true, seed};
      check_attend(c, Placement::kDevice);
    }
    emulation::options() = {};
#else
    for (Placement placement : placements()) check_attend(c, placement);
#endif
  }
}

// Long rows: many CTAs with few tiles each, and CTAs with many tiles.
TEST(attend_long_rows) {
  if (quick()) return;
  for (DType dtype : kDTypes)
    for (int batch : {1, 40}) {
      Shape s;
      s.dtype = dtype;
      s.head_dim = 64;
      s.group = 2;
      s.batch = batch;
      s.kv_heads = batch == 1 ? 1 : 7;
      s.layers = 1;
      s.layer = 0;
      s.page_size = 64;
      s.max_pages = batch == 1 ? 300 : 6;
      std::vector<int> lengths(batch), seq(batch, 1);
      for (int b = 0; b < batch; ++b) lengths[b] = s.capacity() - 1 - 37 * b % s.capacity();
      AttendCase c(s, lengths, seq, 17);
      for (Placement placement : placements()) check_attend(c, placement);
    }
}

#if defined(DIRECTKV_EMULATE_CUDA)
// A kernel may start before those it depends on have ended: what they have not written yet, or what
// stood there before, must not count.
TEST(attend_operands_written_late) {
  std::mt19937 rng(5);
  for (int round = 0; round < (quick() ? 6 : 40); ++round) {
    Shape s;
    s.dtype = pick(rng, kDTypes);
    s.batch = pick(rng, {1, 3, 40, 70});
    s.kv_heads = 2;
    s.group = pick(rng, {1, 20});
    s.query_tokens = pick(rng, {1, 9});
    s.max_pages = 5;
    s.num_ctas = pick(rng, {3, 40});
    std::vector<int> lengths(s.batch), seq(s.batch, s.query_tokens), wrong(s.batch);
    for (int b = 0; b < s.batch; ++b) {
      lengths[b] = static_cast<int>(rng() % (s.capacity() + 1));
      wrong[b] = rng() % 4 ? static_cast<int>(rng() % (s.capacity() + 1)) : INT32_MAX;
    }
    AttendCase c(s, lengths, seq, 23u + round);
    DeviceCase device(c, Placement::kDevice);
    const AttendParams p = device.params();
    const auto late = [](const void* at, size_t bytes) {
      emulation::write_late(at, std::vector<char>(bytes, '\xff'));
    };
    const char* const first = reinterpret_cast<const char*>(wrong.data());
    emulation::write_late(p.cache.lengths, {first, first + 4 * s.batch});
    if (round % 2) late(p.seq_lengths, 4 * s.batch);
    if (round % 3 == 0) late(p.cache.layer, 4);
    late(p.cache.page_table, 4 * c.page_table.size());
    late(p.cache.pages, c.pages.size());
    late(p.query, c.query.size());
    late(p.key, c.key.size());
    late(p.value, c.value.size());
    device.attend();
    const OracleResult want = oracle(c, 0, s.max_pages, true);
    const double error = relative_error(outputs(c), want.out);
    CHECK(error <= tolerance(s.dtype), "error %.3g: %s", error, s.text().c_str());
  }
}
#endif

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
  AttendCase c(s, lengths, seq, 5);
  c.page_table[5 * 3 + 0] = static_cast<int32_t>(c.pool_pages);
  c.page_table[6 * 3 + 2] = -1;
  for (Placement placement : placements()) {
    c.layer = 1;
    DeviceCase device(c, placement);
    device.attend();
    for (int b = 0; b < s.batch; ++b)
      for (int t = 0; t < 2; ++t)
        for (int n = 0; n < 2; ++n) {
          const int64_t at = (b * 2 + t) * 2 + n;
          const bool queried = t < seq[b] || seq[b] < 0 || seq[b] > 2;
          for (int h = 0; h < s.head_dim; ++h) {
            const double out = c.out_at(at * s.head_dim + h);
            CHECK(queried ? std::isnan(out) == nan[b] : out == 0, "row %d query %d: %g", b, t, out);
          }
          CHECK(queried ? std::isnan(c.lse[at]) == nan[b] : c.lse[at] == -INFINITY,
                "row %d query %d: lse %g", b, t, c.lse[at]);
        }
    for (int32_t layer : {-1, 2, INT32_MAX, INT32_MIN}) {
      c.layer = layer;
      device.upload_bookkeeping();
      device.attend();
      CHECK(std::isnan(c.lse[0]) && c.lse[7 * 4] == -INFINITY, "layer %d", layer);
    }
  }
}

// Lengths and ids at the ends of int32, with the largest and smallest windows.
TEST(attend_extreme_bookkeeping) {
  for (int window : {-1, 0, INT32_MAX}) {
    Shape s;
    s.batch = 4;
    s.query_tokens = 3;
    s.window_left = window;
    AttendCase c(s, {INT32_MAX, INT32_MIN, 20, 64}, {3, 3, INT32_MAX, INT32_MIN}, 7);
    DeviceCase device(c, placements().back());
    device.attend();
    for (float x : c.lse) CHECK(std::isnan(x), "window %d", window);
  }
  Shape s;
  s.window_left = INT32_MAX;
  s.query_tokens = 3;
  AttendCase c(s, {50}, {3}, 8);
  check_everywhere(c);
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

// A bad page that only the first row block needs makes all valid queries of the row NaN.
TEST(attend_bad_page_of_another_row_block) {
  Shape s;
  s.group = 16;
  s.query_tokens = 33;  // 528 rows in blocks
  s.max_pages = 6;
  s.window_left = 20;
  AttendCase c(s, {90}, {30}, 3);
  c.page_table[4] = -7;  // positions 64..79: first seen by query 0, last by query 9
  DeviceCase device(c, Placement::kDevice);
  device.attend();
  for (int t = 0; t < 33; ++t)
    for (int n = 0; n < 16; ++n) {
      const float lse = c.lse[t * 16 + n];
      CHECK(t < 30 ? std::isnan(lse) : lse == -INFINITY, "query %d: %g", t, lse);
    }
}

// A NaN in a token reaches the queries that see it and no other.
TEST(attend_nan_in_data_propagates) {
  for (DType dtype : kDTypes)
    for (bool value : {false, true})
      for (int at : {0, 42, 44, 45}) {
        Shape s;
        s.dtype = dtype;
        s.query_tokens = 5;
        s.group = 3;
        s.window_left = 3;
        AttendCase c(s, {44}, {5}, 11);
        if (at < 44) {
          encode(dtype, c.pages.data(), c.cached(0, at, 0, 3, value), NAN);
        } else {
          encode(dtype, value ? c.value.data() : c.key.data(), (at - 44) * 64 + 3, NAN);
        }
        check_everywhere(c);
      }
}

TEST(attend_extreme_logits) {
  for (DType dtype : kDTypes)
    for (float scale : {1e-6f, 3.0f, -2.0f, 30.0f}) {
      Shape s;
      s.dtype = dtype;
      s.scale = scale;
      s.group = 4;
      s.max_pages = 5;
      AttendCase c(s, {70}, {1}, 19);
      // Logits of hundreds carry float32 rounding of the products into the exponent.
      check_attend(c, placements().back(), std::max(1.0, std::fabs(scale) * 64.0));
    }
}

TEST(attend_nothing_to_do) {
  Shape s;
  s.query_tokens = 3;
  s.fresh = false;
  s.window_left = 0;  // queries 0 to 2 stand beyond all cached tokens
  AttendCase empty(s, {17}, {3}, 1);
  check_everywhere(empty);
  AttendParams p = empty.params();
  p.cache.batch = 0;
  CHECK(cuda::attend(p, nullptr) == cudaSuccess, "batch 0");
  p = empty.params();
  p.query_tokens = p.fresh_tokens = 0;
  CHECK(cuda::attend(p, nullptr) == cudaSuccess, "no queries");
}

TEST(attend_supported_shapes) {
  for (DType dtype : kDTypes) {
    for (int head_dim : kHeadDims) CHECK(cuda::attend_supported(dtype, head_dim), "%d", head_dim);
    for (int head_dim : {0, 8, 72, 112, 512})
      CHECK(!cuda::attend_supported(dtype, head_dim), "%d", head_dim);
  }
  Shape s;
  s.head_dim = 72;
  AttendCase c(s, {17}, {1}, 1);
  CHECK(cuda::attend(c.params(), nullptr) != cudaSuccess, "refused, nothing launched");
}

}  // namespace
}  // namespace directkv::test

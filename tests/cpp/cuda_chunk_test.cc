// attend for many new tokens: the chunk kernel, its ring of ranges and its edges.
#include <cmath>
#include <random>

#include "../../csrc/cuda/chunk_plan.h"
#include "../../csrc/cuda/device_limits.h"
#include "../../csrc/cuda/kernels.h"
#include "check.h"
#include "cuda_device_case.h"
#if defined(DIRECTKV_EMULATE_CUDA)
#include "cuda_emulation.h"
#endif

namespace directkv::test {
namespace {

std::vector<Placement> everywhere() {
  std::vector<Placement> all = placements();
#if defined(DIRECTKV_EMULATE_CUDA)
  all.insert(all.begin(), Placement::kDevice);  // before the workspace shrinks
#endif
  return all;
}

// In every placement.
void check_chunk(AttendCase& c) {
  const OracleResult want = oracle(c, 0, c.shape.max_pages, true);
  for (Placement placement : everywhere()) {
    // No byte more than the plan says, where it is carried out.
    if (placement != Placement::kDevice && cuda::device_limits().warpgroups) {
      const Shape& s = c.shape;
      const cuda::ChunkPlan plan = cuda::make_chunk_plan(
          2, s.batch, s.query_tokens, s.heads(), s.kv_heads, s.head_dim, s.page_size, s.max_pages,
          s.ring_slot_bytes ? s.ring_slot_bytes : cuda::kRingSlotBytes);
      c.workspace.resize((2 * plan.slot_bytes + plan.state_bytes) / 4);
    }
    DeviceCase device(c, placement);
    device.attend();
    const double error = relative_error(outputs(c), want.out);
    CHECK(error <= tolerance(c.shape.dtype), "%s error %.3g: %s", name(placement), error,
          c.shape.text().c_str());
    const double gap = lse_gap(c, want.lse);
    CHECK(gap <= 2e-5, "%s lse gap %.3g: %s", name(placement), gap, c.shape.text().c_str());
  }
}

// Every instance, over several ranges of the ring.
TEST(chunk_every_instance) {
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (int head_dim : {64, 128, 256}) {
      Shape s;
      s.dtype = dtype;
      s.head_dim = head_dim;
      s.group = 4;
      s.query_tokens = quick() ? 33 : 70;
      s.kv_heads = quick() ? 1 : 2;
      s.page_size = 64;
      s.max_pages = quick() ? 6 : 40;
      s.ring_slot_bytes = 65536;
      AttendCase c(s, {s.capacity() - s.query_tokens}, {s.query_tokens}, 200u + head_dim);
      check_chunk(c);
    }
}

TEST(chunk_random_shapes) {
  for (int round = 0; round < (quick() ? 8 : 60); ++round) {
    std::mt19937 rng(300 + round);
    const auto pick = [&](std::initializer_list<int> from) {
      return from.begin()[rng() % from.size()];
    };
    Shape s;
    s.dtype = rng() % 2 ? DType::kBF16 : DType::kF16;
    s.head_dim = quick() ? 64 : pick({64, 128, 256});
    s.group = pick({1, 3, 7, 16});
    s.query_tokens = (128 + s.group) / s.group + static_cast<int>(rng() % (quick() ? 40 : 300));
    s.kv_heads = pick({1, 2});
    s.batch = pick({1, 2, 3});
    s.page_size = pick({16, 32, 48, 128});
    s.max_pages = 1 + static_cast<int>(rng() % (quick() ? 12 : 60));
    s.ring_slot_bytes = rng() % 4 ? 65536 : 0;
    s.fresh = rng() % 4 != 0;
    s.soft_cap = rng() % 3 ? 0.0f : 5.0f;
    s.window_left = rng() % 2 ? -1 : pick({0, 5, 100, 300});
    std::vector<int> lengths, seq;
    for (int b = 0; b < s.batch; ++b) {
      lengths.push_back(static_cast<int>(rng() % (s.capacity() + 1)));
      seq.push_back(rng() % 2 ? s.query_tokens : static_cast<int>(rng() % (s.query_tokens + 1)));
    }
    AttendCase c(s, lengths, seq, 400 + round);
    check_chunk(c);
  }
}

// A NaN or an infinity reaches the queries that see its token and no other.
TEST(chunk_nonfinite_values) {
  for (double value : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
    for (bool is_value : {true, false})
      for (int at : {0, 90, 99, 100, 120, 149}) {
        if (!is_value && std::isinf(value)) continue;
        Shape s;
        s.dtype = DType::kBF16;
        s.head_dim = 64;
        s.group = 4;
        s.query_tokens = 50;
        s.page_size = 16;
        s.max_pages = 7;
        s.window_left = 30;
        AttendCase c(s, {100}, {50}, 11);
        if (at < 100) {
          if (at < 70) continue;  // left of every window: may be anything
          encode(s.dtype, c.pages.data(), c.cached(0, at, 0, 3, is_value), value);
        } else {
          encode(s.dtype, is_value ? c.value.data() : c.key.data(), (at - 100) * 64 + 3, value);
        }
        const OracleResult want = oracle(c, 0, s.max_pages, true);
        DeviceCase device(c, everywhere().back());
        device.attend();
        for (size_t i = 0; i < want.out.size(); ++i) {
          const double out = c.out_at(i);
          CHECK(std::isfinite(out) == std::isfinite(want.out[i]),
                "token %d, element %zu: %g for %g", at, i, out, want.out[i]);
        }
      }
}

TEST(chunk_invalid_rows) {
  Shape s;
  s.dtype = DType::kF16;
  s.batch = 6;
  s.group = 4;
  s.query_tokens = 40;
  s.max_pages = 3;
  s.ring_slot_bytes = 1;  // a page
  const std::vector<int> lengths = {40, -1, 49, 40, 40, 10}, seq = {40, 33, 40, 41, 40, 0};
  const std::vector<bool> nan = {false, true, true, true, true, false};
  AttendCase c(s, lengths, seq, 5);
  c.page_table[4 * 3 + 1] = -1;
  for (Placement placement : everywhere()) {
    DeviceCase device(c, placement);
    device.attend();
    for (int b = 0; b < s.batch; ++b)
      for (int t = 0; t < s.query_tokens; ++t) {
        const int64_t at = (int64_t{b} * s.query_tokens + t) * 4;
        const bool queried = t < seq[b] || seq[b] > s.query_tokens;
        CHECK(queried ? std::isnan(c.lse[at]) == nan[b] : c.lse[at] == -INFINITY,
              "row %d query %d: lse %g", b, t, c.lse[at]);
        const double out = c.out_at(at * s.head_dim);
        CHECK(queried ? std::isnan(out) == nan[b] : out == 0, "row %d query %d: %g", b, t, out);
      }
  }
}

TEST(chunk_plan_is_bounded) {
  for (int batch : {1, 4, 64})
    for (int64_t max_pages : {1, 100, 2048, 8192, 1 << 20}) {
      const cuda::ChunkPlan plan = cuda::make_chunk_plan(2, batch, 2048, 32, 8, 128, 64, max_pages);
      CHECK(plan.used && plan.ranges <= cuda::kMaxChunkLaunches, "%d", plan.ranges);
      CHECK(int64_t{plan.ranges} * plan.range_tokens >= max_pages * 64, "covers the capacity");
      CHECK(plan.range_tokens % 64 == 0 && plan.row_blocks * plan.tokens_per_block >= 2048,
            "whole");
    }
  CHECK(!cuda::make_chunk_plan(4, 1, 2048, 32, 8, 128, 64, 8).used, "float32");
  CHECK(!cuda::make_chunk_plan(2, 1, 2048, 32, 8, 96, 64, 8).used, "head dim 96");
  CHECK(!cuda::make_chunk_plan(2, 1, 32, 32, 8, 128, 64, 8).used, "one CTA holds all rows");
}

}  // namespace
}  // namespace directkv::test

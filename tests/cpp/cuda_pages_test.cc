// append, read_pages and write_pages.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "../../csrc/cuda/kernels.h"
#include "check.h"
#include "cuda_device_case.h"

namespace directkv::test {
namespace {

TEST(append_all_or_none) {
  for (Placement placement : placements())
    for (DType dtype : {DType::kBF16, DType::kF32}) {
      Shape s;
      s.dtype = dtype;
      s.batch = 9;
      s.query_tokens = 40;
      s.kv_heads = 3;
      s.max_pages = 4;  // 64 tokens
      const std::vector<int> lengths = {0, 24, 25, 13, 7, -1, 65, 20, INT32_MAX};
      const std::vector<int> seq = {40, 40, 40, 5, 0, 3, 1, 41, 40};
      const std::vector<bool> written = {true,  true,  false, true, false,
                                         false, false, false, false};
      AttendCase c(s, lengths, seq, 9);
      for (int b = 0; b < s.batch; ++b)
        for (int p = 0; p < 4; ++p) c.page_table[b * 4 + p] = (b * 4 + p) * 4 % 39;
      std::vector<char> want = c.pages;
      DeviceCase device(c, placement);
      device.append();
      const int item = itemsize(dtype);
      for (int b = 0; b < s.batch; ++b) {
        if (!written[b]) continue;
        for (int t = 0; t < seq[b]; ++t)
          for (int k = 0; k < 3; ++k)
            for (int v = 0; v < 2; ++v) {
              const int64_t to = c.cached(b, lengths[b] + t, k, 0, v) * item;
              const int64_t from = ((int64_t{b} * 40 + t) * 3 + k) * 64 * item;
              std::memcpy(&want[to], &(v ? c.value : c.key)[from], 64 * item);
            }
      }
      CHECK(want == c.pages, "%s dtype %d", name(placement), static_cast<int>(dtype));
    }
}

// Long enough for many CTAs per row and many pages.
TEST(append_long_row) {
  Shape s;
  s.dtype = DType::kBF16;
  s.batch = 2;
  s.head_dim = 80;
  s.kv_heads = 5;
  s.query_tokens = quick() ? 70 : 700;
  s.page_size = 48;
  s.max_pages = quick() ? 3 : 20;
  const int T = s.query_tokens;
  AttendCase c(s, {17, 3}, {T, T - 9}, 4);
  const std::vector<int32_t> good = [&] {
    std::vector<int32_t> ids(2 * s.max_pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::reverse(ids.begin(), ids.end());
    return ids;
  }();
  for (bool bad : {false, true}) {
    c.page_table = good;
    std::vector<char> want = c.pages;
    for (int b = 0; b < 2; ++b) {
      if (bad && b == 0) continue;
      for (int t = 0; t < c.seq_lengths[b]; ++t)
        for (int k = 0; k < 5; ++k)
          for (int v = 0; v < 2; ++v)
            std::memcpy(&want[2 * c.cached(b, c.lengths[b] + t, k, 0, v)],
                        &(v ? c.value : c.key)[((int64_t{b} * T + t) * 5 + k) * 160], 160);
    }
    if (bad) c.page_table[(c.lengths[0] + T - 1) / s.page_size] = 1 << 20;
    DeviceCase device(c, placements().back());
    device.append();
    CHECK(want == c.pages, "bad page: %d", bad);
    std::fill(c.pages.begin(), c.pages.end(), 1);
  }
}

TEST(append_refuses_bad_pages_and_layers) {
  Shape s;
  s.batch = 1;
  s.query_tokens = 20;
  AttendCase c(s, {10}, {20}, 9);
  const std::vector<char> before = c.pages;
  DeviceCase device(c, placements().back());
  const auto append = [&] {
    device.upload_bookkeeping();
    device.append();
  };
  const std::vector<int32_t> good = {0, 1, 2, 3};
  for (int32_t bad : {-1, static_cast<int>(c.pool_pages), INT32_MAX, INT32_MIN}) {
    c.page_table = good;
    c.page_table[1] = bad;
    append();
    CHECK(before == c.pages, "page id %d", bad);
  }
  c.page_table = good;
  for (int32_t layer : {-1, 2, INT32_MAX}) {
    c.layer = layer;
    append();
    CHECK(before == c.pages, "layer %d", layer);
  }
  c.layer = 1;
  c.page_table[3] = -1;  // not needed
  append();
  CHECK(before != c.pages, "a row whose own pages are good is written");
}

// What was appended is what attend then finds in the cache.
TEST(append_then_attend) {
  for (Placement placement : placements()) {
    Shape s;
    s.dtype = DType::kF32;
    s.query_tokens = 5;
    s.group = 3;
    s.kv_heads = 2;
    AttendCase c(s, {30}, {4}, 21);
    c.page_table = {2, 0, 5, 1};
    for (int t = 0; t < 30; ++t)
      for (int k = 0; k < 2; ++k)
        for (int h = 0; h < 128; ++h)
          encode(s.dtype, c.pages.data(), c.cached(0, t, k, h % 64, h >= 64), (t * h + k) % 7 - 3);
    DeviceCase device(c, placement);
    device.append();
    c.lengths[0] = 34;
    device.upload_bookkeeping();
    device.attend();
    const OracleResult want = oracle(c, 0, s.max_pages, true);
    std::vector<double> out(want.out.size());
    for (size_t i = 0; i < out.size(); ++i) out[i] = c.out_at(i);
    CHECK(relative_error(out, want.out) <= 4 * tolerance(s.dtype), "%s", name(placement));
  }
}

TEST(pages_read_and_write) {
  for (Placement placement : placements()) {
    const PageLayout layout = {DType::kBF16, 16, 2, 72};  // a page is not a whole number of runs
    const int64_t layers = 3, pool_pages = 5, page = layout.page_bytes();
    std::vector<char> pages(layers * pool_pages * page), dense(4 * layers * page, 7);
    for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<char>(i * 31 + i / 253);
    const std::vector<int32_t> from = {4, -1, 0, 5}, to = {1, INT32_MAX, 2, INT32_MIN};
    Buffer pool(pages.size(), placement), buffer(dense.size(), Placement::kDevice),
        ids(4 * from.size(), Placement::kDevice);
    pool.upload(pages.data());
    buffer.upload(dense.data());
    ids.upload(from.data());
    const PageCopyParams p = {
        layout, pool.get(), buffer.get(), static_cast<int32_t*>(ids.get()), layers, pool_pages, 4};
    CUDA_CHECK(cuda::read_pages(p, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    buffer.download(dense.data());
    for (int i = 0; i < 4; ++i)
      for (int64_t l = 0; l < layers; ++l) {
        const char* got = dense.data() + (i * layers + l) * page;
        if (i % 2) {
          CHECK(std::count(got, got + page, 0) == page, "id out of range reads zeros");
        } else {
          CHECK(!std::memcmp(got, pages.data() + (l * pool_pages + from[i]) * page, page), "page");
        }
      }
    for (int i : {0, 2})
      for (int64_t l = 0; l < layers; ++l)
        std::memcpy(pages.data() + (l * pool_pages + to[i]) * page,
                    dense.data() + (i * layers + l) * page, page);
    ids.upload(to.data());
    CUDA_CHECK(cuda::write_pages(p, nullptr));
    CUDA_CHECK(cudaDeviceSynchronize());
    std::vector<char> after(pages.size());
    pool.download(after.data());
    CHECK(after == pages, "pages written, ids out of range skipped");
  }
}

TEST(nothing_to_append_or_copy) {
  AppendParams append = {};
  append.cache.layout = {DType::kBF16, 16, 1, 64};
  CHECK(cuda::append(append, nullptr) == cudaSuccess, "batch 0");
  append.cache.batch = 1;
  CHECK(cuda::append(append, nullptr) == cudaSuccess, "no tokens");
  PageCopyParams copy = {};
  copy.layout = append.cache.layout;
  copy.num_layers = 1;
  CHECK(cuda::read_pages(copy, nullptr) == cudaSuccess, "no pages");
  CHECK(cuda::write_pages(copy, nullptr) == cudaSuccess, "no pages");
}

}  // namespace
}  // namespace directkv::test

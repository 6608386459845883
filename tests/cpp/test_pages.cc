// append, read_pages and write_pages.
#include <cstring>
#include <numeric>

#include "../../csrc/cpu/kernels.h"
#include "attend_case.h"
#include "check.h"
#include "thread_pool.h"

namespace directkv::test {
namespace {

AppendParams append_params(AttendCase& c) {
  return {c.params().cache, c.key.data(), c.value.data(), c.seq_lengths.data(),
          c.shape.query_tokens};
}

TEST(append_all_or_none) {
  for (DType dtype : {DType::kBF16, DType::kF32}) {
    Shape s;
    s.dtype = dtype;
    s.batch = 8;
    s.query_tokens = 40;
    s.kv_heads = 3;
    s.max_pages = 4;  // 64 tokens
    const std::vector<int> lengths = {0, 24, 25, 13, 7, -1, 65, 20};
    const std::vector<int> seq = {40, 40, 40, 5, 0, 3, 1, 41};
    const std::vector<bool> written = {true, true, false, true, false, false, false, false};
    AttendCase c(s, lengths, seq, 9);
    for (int b = 0; b < s.batch; ++b)
      for (int p = 0; p < 4; ++p) c.page_table[b * 4 + p] = (b * 4 + p) * 3 % 35;
    std::vector<char> before = c.pages;
    ThreadPool pool(2);
    cpu::append(append_params(c), pool.executor());
    const int item = itemsize(dtype);
    for (int b = 0; b < s.batch; ++b) {
      if (!written[b]) continue;
      for (int t = 0; t < seq[b]; ++t)
        for (int k = 0; k < 3; ++k)
          for (int v = 0; v < 2; ++v) {
            const int64_t to = c.cached(b, lengths[b] + t, k, 0, v) * item;
            const int64_t from = ((int64_t{b} * 40 + t) * 3 + k) * 64 * item;
            const std::vector<char>& source = v ? c.value : c.key;
            CHECK(!std::memcmp(&c.pages[to], &source[from], 64 * item), "row %d token %d", b, t);
            std::memcpy(&before[to], &source[from], 64 * item);
          }
    }
    CHECK(before == c.pages, "nothing else may change");
  }
}

TEST(append_refuses_bad_pages_and_layers) {
  Shape s;
  s.batch = 1;
  s.query_tokens = 20;
  AttendCase c(s, {10}, {20}, 9);
  const std::vector<char> before = c.pages;
  std::vector<int32_t> good = {0, 1, 2, 3};
  for (int32_t bad : {-1, static_cast<int>(c.pool_pages)}) {
    c.page_table = good;
    c.page_table[1] = bad;
    cpu::append(append_params(c), {});
    CHECK(before == c.pages, "page id %d", bad);
  }
  c.page_table = good;
  for (int32_t layer : {-1, 2}) {
    c.layer = layer;
    cpu::append(append_params(c), {});
    CHECK(before == c.pages, "layer %d", layer);
  }
  c.layer = 1;
  c.page_table[3] = -1;  // not needed
  cpu::append(append_params(c), {});
  CHECK(before != c.pages, "a row whose own pages are good is written");
}

TEST(pages_read_and_write) {
  const PageLayout layout = {DType::kBF16, 16, 2, 24};
  const int64_t layers = 3, pool_pages = 5, page = layout.page_bytes();
  std::vector<char> pages(layers * pool_pages * page), buffer(4 * layers * page, 7);
  for (size_t i = 0; i < pages.size(); ++i) pages[i] = static_cast<char>(i * 31 + i / 253);
  const std::vector<int32_t> ids = {4, -1, 0, 5};
  ThreadPool pool(2);
  PageCopyParams p = {layout, pages.data(), buffer.data(), ids.data(), layers, pool_pages, 4};
  cpu::read_pages(p, pool.executor());
  for (int i = 0; i < 4; ++i)
    for (int64_t l = 0; l < layers; ++l) {
      const char* got = buffer.data() + (i * layers + l) * page;
      if (i % 2) {
        CHECK(std::count(got, got + page, 0) == page, "id out of range reads zeros");
      } else {
        CHECK(!std::memcmp(got, pages.data() + (l * pool_pages + ids[i]) * page, page), "page");
      }
    }
  const std::vector<int32_t> to = {1, 7, 2, -3};
  std::vector<char> want = pages;
  for (int i : {0, 2})
    for (int64_t l = 0; l < layers; ++l)
      std::memcpy(want.data() + (l * pool_pages + to[i]) * page,
                  buffer.data() + (i * layers + l) * page, page);
  p.page_ids = to.data();
  cpu::write_pages(p, pool.executor());
  CHECK(want == pages, "pages written, ids out of range skipped");
}

}  // namespace
}  // namespace directkv::test

// parallel_chunks must finish however late, or never, its helpers run.
#include <atomic>
#include <memory>
#include <numeric>

#include "../../csrc/cpu/parallel.h"
#include "check.h"
#include "thread_pool.h"

namespace directkv::test {
namespace {

int64_t sum_of_chunks(const cpu::Executor& executor, int64_t n) {
  std::vector<int64_t> hits(n, 0);
  cpu::parallel_chunks(n, executor, [&](int64_t chunk, int slot) {
    hits[chunk] += 1;
    CHECK(slot >= 0 && slot <= executor.workers, "slot %d", slot);
  });
  return std::accumulate(hits.begin(), hits.end(), int64_t{0});
}

// As XLA does it: the pool's own threads are inside handlers that borrow the same pool.
void nested_calls(int threads) {
  ThreadPool pool(threads);
  std::atomic<int> done{0};
  std::atomic<int64_t> total{0};
  std::mutex mutex;
  std::condition_variable all;
  for (int call = 0; call < 12; ++call) {
    pool.schedule([&, call] {
      cpu::Executor executor = pool.executor();
      executor.workers = 4;  // more helpers asked for than there are threads
      for (int repeat = 0; repeat < 50; ++repeat) total += sum_of_chunks(executor, 1 + call * 7);
      std::lock_guard<std::mutex> lock(mutex);
      if (++done == 12) all.notify_all();
    });
  }
  std::unique_lock<std::mutex> lock(mutex);
  all.wait(lock, [&] { return done == 12; });
  CHECK(total == 50 * (12 + 7 * 66), "every chunk ran once");
}

TEST(parallel_12_calls_on_a_pool_of_1) { nested_calls(1); }
TEST(parallel_12_calls_on_a_pool_of_2) { nested_calls(2); }

TEST(parallel_pool_that_never_runs) {
  std::vector<std::function<void()>> kept;
  const cpu::Executor never = {8, [&](std::function<void()> task) { kept.push_back(task); }};
  CHECK(sum_of_chunks(never, 100) == 100, "the caller does it all");
  // The helpers arrive after the call has returned: nothing left to do, nothing freed touched.
  for (auto& task : kept) task();
}

TEST(parallel_pool_that_refuses) {
  const cpu::Executor refuses = {2, [](std::function<void()>) { throw 1; }};
  CHECK(sum_of_chunks(refuses, 10) == 10, "the caller does it all");
}

TEST(parallel_pool_that_runs_at_once) {
  const cpu::Executor inline_pool = {3, [](std::function<void()> task) { task(); }};
  CHECK(sum_of_chunks(inline_pool, 10) == 10, "the first helper does it all");
}

TEST(parallel_edges) {
  ThreadPool pool(2);
  CHECK(sum_of_chunks(pool.executor(), 0) == 0, "no chunks");
  CHECK(sum_of_chunks(pool.executor(), 1) == 1, "one chunk");
  CHECK(sum_of_chunks({}, 5) == 5, "no executor");
  for (int i = 0; i < 2000; ++i) CHECK(sum_of_chunks(pool.executor(), 7) == 7, "call %d", i);
}

}  // namespace
}  // namespace directkv::test

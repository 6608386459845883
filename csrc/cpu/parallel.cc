#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

namespace directkv::cpu {
namespace {

// Shared by the caller and its helpers; the last of them frees it, so a helper that starts after
// the call has returned still finds the counter (exhausted) and touches nothing else.
struct Loop {
  explicit Loop(int64_t count, const ChunkFn* body) : n(count), fn(body) {}

  const int64_t n;
  const ChunkFn* const fn;  // lives in the caller's frame: valid only inside a chunk below n
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> finished{0};
  std::mutex mutex;
  std::condition_variable all_finished;

  void work(int slot) {
    for (;;) {
      const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
      if (chunk >= n) return;
      (*fn)(chunk, slot);
      if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 == n) {
        // Under the mutex, so that the notification cannot fall between test and wait.
        std::lock_guard<std::mutex> lock(mutex);
        all_finished.notify_all();
      }
    }
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    all_finished.wait(lock, [&] { return finished.load(std::memory_order_acquire) == n; });
  }
};

}  // namespace

void parallel_chunks(int64_t n, const Executor& executor, const ChunkFn& fn) {
  if (n <= 0) return;
  const int64_t helpers =
      executor.schedule ? std::min<int64_t>(std::max(executor.workers, 0), n - 1) : 0;
  if (helpers == 0) {
    for (int64_t chunk = 0; chunk < n; ++chunk) fn(chunk, 0);
    return;
  }
  auto loop = std::make_shared<Loop>(n, &fn);
  for (int slot = 1; slot <= helpers; ++slot) {
    try {
      executor.schedule([loop, slot] { loop->work(slot); });
    } catch (...) {
      break;  // a pool that refuses tasks costs speed, not the result
    }
  }
  loop->work(0);
  loop->wait();
}

}  // namespace directkv::cpu

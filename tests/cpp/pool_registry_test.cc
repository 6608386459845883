// The registry of live pool ranges: inside, outside, neighbours, and many threads at once.
#include "../../csrc/pool_registry.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"

namespace directkv::test {
namespace {

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(registry_ranges) {
  CHECK(!range_registered(at(0x1000)), "nothing is registered yet");
  register_range(at(0x1000), 0x100);
  register_range(at(0x1100), 0x100);
  register_range(at(0x3000), 1);
  for (uintptr_t inside : {0x1000, 0x10ff, 0x1100, 0x11ff, 0x3000})
    CHECK(range_registered(at(inside)), "%zx", size_t{inside});
  for (uintptr_t outside : {0x0, 0xfff, 0x1200, 0x2fff, 0x3001})
    CHECK(!range_registered(at(outside)), "%zx", size_t{outside});
  unregister_range(at(0x1000));
  CHECK(!range_registered(at(0x10ff)) && range_registered(at(0x1100)), "only one is gone");
  unregister_range(at(0x1150));  // not the first address of a range: nothing happens
  CHECK(range_registered(at(0x1150)), "still there");
  unregister_range(at(0x1100));
  unregister_range(at(0x3000));
  unregister_range(at(0x3000));
  CHECK(!range_registered(at(0x1100)) && !range_registered(at(0x3000)), "all are gone");
}

TEST(registry_many_threads) {
  std::atomic<int> wrong{0};
  register_range(at(0x10), 16);
  std::vector<std::thread> threads;
  for (uintptr_t n = 1; n <= 4; ++n) {
    threads.emplace_back([n, &wrong] {
      const uintptr_t base = n << 20;
      for (int i = 0; i < 5000; ++i) {
        register_range(at(base), 4096);
        wrong += !range_registered(at(base + 4095)) || !range_registered(at(0x1f));
        unregister_range(at(base));
        wrong += range_registered(at(base + 1));
      }
    });
  }
  for (std::thread& t : threads) t.join();
  unregister_range(at(0x10));
  CHECK(wrong == 0, "%d wrong answers", wrong.load());
}

}  // namespace
}  // namespace directkv::test

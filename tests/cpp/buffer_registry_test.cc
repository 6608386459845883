// The registry of live buffers: address and size, and many threads at once.
#include "../../csrc/buffer_registry.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "check.h"

namespace directkv::test {
namespace {

const void* at(uintptr_t address) { return reinterpret_cast<const void*>(address); }

TEST(registry_buffers) {
  CHECK(!buffer_registered(at(0x1000), 0x100), "nothing is registered yet");
  register_buffer(at(0x1000), 0x100);
  register_buffer(at(0x1100), 0x200);
  CHECK(buffer_registered(at(0x1000), 0x100) && buffer_registered(at(0x1100), 0x200), "both are");
  CHECK(!buffer_registered(at(0x1000), 0x200), "another size is another buffer");
  CHECK(!buffer_registered(at(0x1010), 0x100), "so is another address");
  register_buffer(at(0x1000), 0x300);
  CHECK(buffer_registered(at(0x1000), 0x300), "the last word holds");
  unregister_buffer(at(0x1010));
  CHECK(buffer_registered(at(0x1000), 0x300), "nothing was there to forget");
  unregister_buffer(at(0x1000));
  CHECK(!buffer_registered(at(0x1000), 0x300) && buffer_registered(at(0x1100), 0x200), "one left");
  unregister_buffer(at(0x1100));
  CHECK(!buffer_registered(at(0x1100), 0x200), "all are gone");
}

TEST(registry_many_threads) {
  std::atomic<int> wrong{0};
  register_buffer(at(0x10), 16);
  std::vector<std::thread> threads;
  for (uintptr_t n = 1; n <= 4; ++n) {
    threads.emplace_back([n, &wrong] {
      const void* p = at(n << 20);
      for (int i = 0; i < 5000; ++i) {
        register_buffer(p, 4096);
        wrong += !buffer_registered(p, 4096) || !buffer_registered(at(0x10), 16);
        unregister_buffer(p);
        wrong += buffer_registered(p, 4096);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  unregister_buffer(at(0x10));
  CHECK(wrong == 0, "%d wrong answers", wrong.load());
}

}  // namespace
}  // namespace directkv::test

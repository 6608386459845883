// The whole test framework: TEST registers a function, CHECK counts what fails and goes on.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace directkv::test {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline int& failures() {
  static int count = 0;
  return count;
}

// DIRECTKV_TEST_DIVISOR=10 runs a tenth of the random cases: for emulators and sanitizers.
inline int share_of(int cases) {
  const char* divisor = std::getenv("DIRECTKV_TEST_DIVISOR");
  const int by = divisor ? std::atoi(divisor) : 1;
  return by > 1 ? (cases + by - 1) / by : cases;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

}  // namespace directkv::test

#define TEST(name)                                                           \
  static void test_##name();                                                 \
  static const directkv::test::Register register_##name(#name, test_##name); \
  static void test_##name()

// The message (printf style) says which case failed.
#define CHECK(condition, ...)                                         \
  do {                                                                \
    if (!(condition)) {                                               \
      if (++directkv::test::failures() <= 50) {                       \
        std::printf("  %s:%d: %s: ", __FILE__, __LINE__, #condition); \
        std::printf(__VA_ARGS__);                                     \
        std::printf("\n");                                            \
      }                                                               \
    }                                                                 \
  } while (0)

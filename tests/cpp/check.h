// The whole test framework: TEST registers a function, CHECK counts what fails and goes on.
#pragma once

#include <cstdio>
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

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

}  // namespace directkv::test

#define TEST(name)                                                         \
  static void test_##name();                                               \
  static const directkv::test::Register register_##name(#name, test_##name); \
  static void test_##name()

// The message (printf style) says which case failed.
#define CHECK(condition, ...)                                             \
  do {                                                                    \
    if (!(condition)) {                                                   \
      if (++directkv::test::failures() <= 50) {                           \
        std::printf("  %s:%d: %s: ", __FILE__, __LINE__, #condition);     \
        std::printf(__VA_ARGS__);                                         \
        std::printf("\n");                                                \
      }                                                                   \
    }                                                                     \
  } while (0)

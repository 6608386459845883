// Runs every test, or those whose name contains the first argument.
#include <cstring>

#include "check.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int ran = 0;
  for (const directkv::test::Test& test : directkv::test::tests()) {
    if (argc > 1 && !std::strstr(test.name, argv[1])) continue;
    const int before = directkv::test::failures();
    test.run();
    std::printf("%-6s %s\n", directkv::test::failures() == before ? "ok" : "FAILED", test.name);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, directkv::test::failures());
  return directkv::test::failures() || ran == 0;
}

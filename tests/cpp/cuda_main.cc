// The CUDA kernels against the double-precision oracle. Arguments: --quick (few small cases, for
// compute-sanitizer), then the part of a name that tests must contain to run.
#include <cstdio>
#include <cstring>

#include "check.h"
#include "cuda_device_case.h"

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const char* filter = "";
  for (int i = 1; i < argc; ++i) {
    if (!std::strcmp(argv[i], "--quick")) {
      directkv::test::set_quick();
    } else {
      filter = argv[i];
    }
  }
  int ran = 0;
  for (const directkv::test::Test& test : directkv::test::tests()) {
    if (!std::strstr(test.name, filter)) continue;
    const int before = directkv::test::failures();
    test.run();
    std::printf("%-6s %s\n", directkv::test::failures() == before ? "ok" : "FAILED", test.name);
    ++ran;
  }
  std::printf("%d tests, %d failed checks\n", ran, directkv::test::failures());
  return directkv::test::failures() || ran == 0;
}

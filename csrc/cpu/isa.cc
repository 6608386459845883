#include "isa.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels.h"

namespace directkv::cpu {
namespace {

#if defined(__x86_64__) || defined(__i386__)
bool runs_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#else
bool runs_avx2() { return false; }
bool runs_avx512() { return false; }
bool runs_avx512bf16() { return false; }
#endif

std::vector<const IsaKernel*> built_kernels() {
  std::vector<const IsaKernel*> kernels;
  for (const IsaKernel* kernel :
       {avx512bf16_kernel(), avx512_kernel(), avx2_kernel(), baseline_kernel()}) {
    if (kernel) kernels.push_back(kernel);
  }
  return kernels;
}

bool runs_here(const IsaKernel* kernel) {
  if (kernel == avx512bf16_kernel()) return runs_avx512bf16();
  if (kernel == avx512_kernel()) return runs_avx512();
  if (kernel == avx2_kernel()) return runs_avx2();
  return true;
}

const IsaKernel* find(const char* name) {
  for (const IsaKernel* kernel : available_kernels()) {
    if (std::strcmp(kernel->name, name) == 0) return kernel;
  }
  return nullptr;
}

const IsaKernel* first_choice() {
  const char* asked = std::getenv("DIRECTKV_CPU_ISA");
  const IsaKernel* named = asked ? find(asked) : nullptr;
  return named ? named : available_kernels().front();
}

std::atomic<const IsaKernel*>& active() {
  static std::atomic<const IsaKernel*> kernel{first_choice()};
  return kernel;
}

}  // namespace

const std::vector<const IsaKernel*>& available_kernels() {
  static const std::vector<const IsaKernel*> kernels = [] {
    std::vector<const IsaKernel*> usable;
    for (const IsaKernel* kernel : built_kernels()) {
      if (runs_here(kernel)) usable.push_back(kernel);
    }
    return usable;
  }();
  return kernels;
}

const IsaKernel& active_kernel() { return *active().load(std::memory_order_acquire); }

bool select_kernel(const char* name) {
  const IsaKernel* kernel = find(name);
  if (kernel) active().store(kernel, std::memory_order_release);
  return kernel != nullptr;
}

const char* isa_name() { return active_kernel().name; }

const char* isa_list() {
  static const std::string names = [] {
    std::string text;
    for (const IsaKernel* kernel : built_kernels()) {
      text += (text.empty() ? "" : ",") + std::string(kernel->name);
    }
    return text;
  }();
  return names.c_str();
}

}  // namespace directkv::cpu

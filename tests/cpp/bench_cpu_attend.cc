// GB/s of attend against a plain read of the same bytes by the same threads.
//   bench_cpu_attend [threads] [tokens ...]     32 query heads, 8 KV heads of 128, B = 1, T = 1
#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/cpu/attend_plan.h"
#include "../../csrc/cpu/isa.h"
#include "../../csrc/cpu/parallel.h"
#include "thread_pool.h"

namespace directkv {
namespace {

constexpr int kHeads = 32, kKvHeads = 8, kHeadDim = 128, kPageSize = 64;

// One thread is measured by its own CPU time, which other processes on the machine do not inflate.
bool cpu_time = false;

double seconds_now() {
  timespec t;
  clock_gettime(cpu_time ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

struct Seconds {
  double median;
  double best;  // what the code can do when other processes leave it alone
};

template <typename Fn>
Seconds measure(int repeats, Fn fn) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds_now();
    fn();
    times.push_back(seconds_now() - start);
  }
  std::sort(times.begin(), times.end());
  return {times[repeats / 2], times[0]};
}

// Sums of 64-bit words in 8 lanes: vectorised loads and one addition, nothing else.
uint64_t read_all(const char* data, int64_t bytes, const cpu::Executor& executor) {
  constexpr int64_t kChunk = 1 << 20;
  std::vector<uint64_t> sums((bytes + kChunk - 1) / kChunk);
  cpu::parallel_chunks(sums.size(), executor, [&](int64_t chunk, int) {
    const uint64_t* at = reinterpret_cast<const uint64_t*>(data + chunk * kChunk);
    const int64_t n = std::min(kChunk, bytes - chunk * kChunk) / 64;
    uint64_t lane[8] = {};
    for (int64_t i = 0; i < n; ++i)
      for (int j = 0; j < 8; ++j) lane[j] += at[8 * i + j];
    sums[chunk] = lane[0] + lane[1] + lane[2] + lane[3] + lane[4] + lane[5] + lane[6] + lane[7];
  });
  uint64_t total = 0;
  for (uint64_t s : sums) total += s;
  return total;
}

void bench(DType dtype, int tokens, test::ThreadPool& pool) {
  const PageLayout layout = {dtype, kPageSize, kKvHeads, kHeadDim};
  const int max_pages = (tokens + kPageSize - 1) / kPageSize;
  const int64_t bytes = max_pages * layout.page_bytes();
  // Larger than any last-level cache: several layers, read one after the other.
  const int64_t layers = std::max<int64_t>(1, (int64_t{512} << 20) / bytes);
  const int64_t total = layers * bytes;
  char* pages = static_cast<char*>(
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  madvise(pages, total, MADV_HUGEPAGE);
  // Bit patterns that are small numbers in each dtype: exponent fields near the bias.
  std::mt19937 rng(1);
  for (int64_t i = 0; i < total / 4; ++i) {
    const uint32_t r = rng();
    const uint32_t word = dtype == DType::kF32    ? 0x3e000000u | (r & 0x80ffffffu)
                          : dtype == DType::kBF16 ? 0x3e003e00u | (r & 0x80ff80ffu)
                                                  : 0x30003000u | (r & 0x87ff87ffu);
    std::memcpy(pages + 4 * i, &word, 4);
  }
  std::vector<int32_t> table(max_pages);
  for (int i = 0; i < max_pages; ++i) table[i] = i;
  std::vector<char> query(kHeads * kHeadDim * itemsize(dtype)), out(query.size()),
      fresh(query.size() / 4);
  std::memcpy(query.data(), pages, query.size());
  std::memcpy(fresh.data(), pages, fresh.size());
  std::vector<float> lse(kHeads);
  std::vector<char> workspace(
      cpu::attend_workspace_bytes(1, 1, kHeads, kKvHeads, kHeadDim, max_pages));
  const int32_t length = tokens, seq = 1;
  int32_t layer = 0;
  AttendParams p = {};
  p.cache = {layout, pages, layers, max_pages, table.data(), &length, &layer, 1, max_pages};
  p.query = query.data();
  p.key = p.value = fresh.data();
  p.seq_lengths = &seq;
  p.out = out.data();
  p.lse = lse.data();
  p.workspace = workspace.data();
  p.query_tokens = p.fresh_tokens = 1;
  p.query_heads = kHeads;
  p.scale = 0.088f;
  p.window_left = -1;

  const cpu::Executor executor = pool.executor();
  static volatile uint64_t sink;
  int64_t read_layer = 0;
  auto read_once = [&] { sink = read_all(pages + read_layer++ % layers * bytes, bytes, executor); };
  auto attend_once = [&] {
    layer = static_cast<int32_t>((layer + 1) % layers);
    cpu::attend(p, executor);
  };
  const int repeats = static_cast<int>(std::clamp<int64_t>((int64_t{4} << 30) / bytes, 9, 201));
  measure(5, read_once);
  const Seconds read = measure(repeats, read_once);
  const char* chosen = cpu::isa_name();
  for (const cpu::IsaKernel* kernel : cpu::available_kernels()) {
    cpu::select_kernel(kernel->name);
    measure(5, attend_once);
    const Seconds attend = measure(repeats, attend_once);
    std::printf(
        "%-5s S=%-6d %-11s attend %5.1f (best %5.1f) GB/s  read %5.1f (best %5.1f) GB/s  "
        "share %.2f (best %.2f)\n",
        dtype == DType::kF32    ? "f32"
        : dtype == DType::kBF16 ? "bf16"
                                : "f16",
        tokens, kernel->name, bytes / attend.median / 1e9, bytes / attend.best / 1e9,
        bytes / read.median / 1e9, bytes / read.best / 1e9, read.median / attend.median,
        read.best / attend.best);
  }
  cpu::select_kernel(chosen);
  munmap(pages, total);
}

}  // namespace
}  // namespace directkv

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
  std::vector<int> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {8192, 32768};
  directkv::cpu_time = threads == 1;
  directkv::test::ThreadPool pool(threads - 1);  // the caller is one of them
  std::printf("threads=%d N=32 K=8 H=128 page=64\n", threads);
  for (directkv::DType dtype :
       {directkv::DType::kBF16, directkv::DType::kF16, directkv::DType::kF32})
    for (int t : tokens) directkv::bench(dtype, t, pool);
}

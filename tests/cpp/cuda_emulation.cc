#include "cuda_emulation.h"

#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace directkv::emulation {
namespace {

constexpr size_t kStackBytes = 128 * 1024;

struct Copy {
  void* to;
  const void* from;
};

struct Barrier {
  int arrived = 0;
  int64_t generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
  std::vector<std::vector<Copy>> copies;  // committed groups not landed, oldest first
  std::vector<Copy> open;
};

std::vector<Fiber> fibers;
ucontext_t scheduler;
int current, threads_in_block;
Barrier block_barrier;
std::vector<Barrier> warp_barriers;
bool or_next, or_result;
uint32_t exchange[1024];
std::unique_ptr<unsigned char[]> shared;
const std::function<void()>* kernel_body;
int64_t progress;  // barriers passed and threads ended

void yield() { swapcontext(&fibers[current].context, &scheduler); }

void wait(Barrier& barrier, int count) {
  const int64_t generation = barrier.generation;
  if (++barrier.arrived == count) {
    barrier.arrived = 0;
    ++barrier.generation;
    ++progress;
    or_result = or_next;
    return;
  }
  while (barrier.generation == generation) yield();
}

void fiber_main() {
  (*kernel_body)();
  fibers[current].done = true;
  ++progress;
  if (!fibers[current].open.empty() || !fibers[current].copies.empty()) {
    std::fprintf(stderr, "a thread ended with copies in flight\n");
    std::abort();
  }
  yield();
}

void land(const std::vector<Copy>& group) {
  for (const Copy& c : group) std::memcpy(c.to, c.from, 16);
}

void run_block() {
  for (int i = 0; i < threads_in_block; ++i) {
    Fiber& f = fibers[i];
    f.done = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = &scheduler;
    makecontext(&f.context, fiber_main, 0);
  }
  for (int left = threads_in_block; left > 0;) {
    const int64_t before = progress;
    for (int n = 0; n < threads_in_block; ++n) {
      current = options().reverse ? threads_in_block - 1 - n : n;
      if (fibers[current].done) continue;
      threadIdx = {static_cast<unsigned>(current), 0, 0};
      swapcontext(&scheduler, &fibers[current].context);
      if (fibers[current].done) --left;
    }
    if (progress == before) {
      std::fprintf(stderr, "deadlock: not all threads reach a barrier\n");
      std::abort();
    }
  }
}

}  // namespace

Options& options() {
  static Options instance;
  return instance;
}

void sync_block() { wait(block_barrier, threads_in_block); }

bool sync_block_or(bool predicate) {
  if (block_barrier.arrived == 0) or_next = false;
  or_next |= predicate;
  wait(block_barrier, threads_in_block);
  return or_result;
}

void sync_warp() { wait(warp_barriers[current / 32], 32); }

uint32_t shuffle_xor(uint32_t value, int mask) {
  exchange[current] = value;
  sync_warp();
  const uint32_t result = exchange[current ^ mask];
  sync_warp();
  return result;
}

unsigned char* dynamic_shared() { return shared.get(); }

void copy_async_16(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0) {
    std::fprintf(stderr, "misaligned asynchronous copy\n");
    std::abort();
  }
  if (options().late_copies) {
    fibers[current].open.push_back({to, from});
  } else {
    std::memcpy(to, from, 16);
  }
}

void copy_async_commit() {
  Fiber& f = fibers[current];
  f.copies.push_back(std::move(f.open));
  f.open.clear();
}

void copy_async_wait(int pending) {
  Fiber& f = fibers[current];
  while (static_cast<int>(f.copies.size()) > pending) {
    land(f.copies.front());
    f.copies.erase(f.copies.begin());
  }
}

void run_grid(int64_t blocks, int threads, size_t shared_bytes, const std::function<void()>& body) {
  if (fibers.size() < static_cast<size_t>(threads)) fibers = std::vector<Fiber>(threads);
  threads_in_block = threads;
  kernel_body = &body;
  gridDim = dim3(static_cast<unsigned>(blocks));
  blockDim = dim3(static_cast<unsigned>(threads));
  for (int64_t b = 0; b < blocks; ++b) {
    blockIdx = {static_cast<unsigned>(b), 0, 0};
    block_barrier = {};
    warp_barriers.assign(threads / 32, {});
    shared.reset(new unsigned char[shared_bytes]);
    std::memset(shared.get(), 0xff, shared_bytes);  // NaN in every dtype
    run_block();
  }
}

}  // namespace directkv::emulation

// The part of the CUDA runtime that the tests call.
extern "C" {

cudaError_t cudaMalloc(void** p, size_t bytes) {
  *p = std::aligned_alloc(256, (bytes + 255) / 256 * 256 + 256);
  return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* p) {
  std::free(p);
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** p, size_t bytes, unsigned) { return cudaMalloc(p, bytes); }
cudaError_t cudaFreeHost(void* p) { return cudaFree(p); }
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes) std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t status) { return status ? "error" : "no error"; }

}  // extern "C"

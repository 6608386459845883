// Fibers jump from stack to stack, which the checked longjmp takes for a mistake.
#undef _FORTIFY_SOURCE

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <set>
#include <vector>

#include "../../csrc/cuda/device_limits.h"
#include "cuda_emulation_threads.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace directkv::emulation {
namespace {

constexpr size_t kStackBytes = 128 * 1024;

// A barrier of threads.
struct Meeting {
  int arrived = 0;
  int64_t generation = 0;
  bool or_next = false, or_result = false;
};

struct Fiber {
  ucontext_t context;  // of its start
  jmp_buf place;       // where it yielded
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
  bool waited = false;        // for earlier kernels
  int64_t cluster_phase = 0;  // the one it arrived in
};

// A thread block of the cluster that runs.
struct Block {
  Meeting all, named[16];
  int left = 0;                   // threads that have not ended
  bool next_kernel_runs = false;  // as far as this block goes
  std::unique_ptr<unsigned char, void (*)(void*)> shared{nullptr, std::free};
};

// Memory that an earlier kernel writes while the blocks of this one already run.
struct LateWrite {
  char* at;
  std::vector<char> before, after;
  const int32_t* flag;
  bool done = true;  // at the moment
};

std::vector<Fiber> fibers;
jmp_buf scheduler;
int threads_in_block, threads_in_cluster;
std::vector<Block> cluster;
Meeting cluster_meeting;
std::vector<Meeting> warp_meetings;
std::vector<const void*> exchanged;
const std::function<void()>* kernel_body;
std::vector<LateWrite> late_writes;
std::vector<std::set<const int32_t*>> warp_flags;  // that a warp has waited for

Block& block() { return cluster[current / threads_in_block]; }

// Every thread finds the memory as it may: what is written late, once it has waited for that.
void write_for_current() {
  for (LateWrite& w : late_writes) {
    const bool seen = fibers[current].waited || warp_flags[current / 32].count(w.flag) > 0;
    if (w.done == seen) continue;
    w.done = seen;
    const std::vector<char>& data = seen ? w.after : w.before;
    std::copy(data.begin(), data.end(), w.at);
  }
}

void resume(Fiber& fiber) {
  write_for_current();
  if (_setjmp(scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

// Lets a warp fall behind the others now and then, by as much as they need for a few tiles.
void stall() {
  if (options().stalls == 0) return;
  const unsigned epoch = static_cast<unsigned>(progress / 64);
  unsigned x = options().stalls * 2654435761u ^ epoch * 40503u ^ current / 32 * 2246822519u;
  x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
  if (x % 64 != 0) return;
  for (int n = 0; n < 1500; ++n) {
    ++progress;
    yield();
  }
}

void arrive(Meeting& barrier, int count) {
  if (++barrier.arrived < count) return;
  barrier.arrived = 0;
  ++barrier.generation;
  ++progress;
  barrier.or_result = barrier.or_next;
}

void wait(Meeting& barrier, int count) {
  const int64_t generation = barrier.generation;
  arrive(barrier, count);
  if (barrier.generation != generation) return;
  while (barrier.generation == generation) yield();
  stall();
}

void fiber_main() {
  (*kernel_body)();
  fibers[current].done = true;
  --block().left;
  ++progress;
  if (!fibers[current].waited) fail("a thread did not wait for earlier kernels");
  if (copies_in_flight()) fail("a thread ended with copies in flight");
  yield();
}

void run_cluster(int64_t first_block) {
  for (int i = 0; i < threads_in_cluster; ++i) {
    Fiber& f = fibers[i];
    f.done = f.started = f.waited = false;
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.get();
    f.context.uc_stack.ss_size = kStackBytes;
    f.context.uc_link = nullptr;
    makecontext(&f.context, fiber_main, 0);
  }
  for (int left = threads_in_cluster; left > 0;) {
    const int64_t before = progress;
    for (int n = 0; n < threads_in_cluster; ++n) {
      current = options().reverse ? threads_in_cluster - 1 - n : n;
      if (fibers[current].done) continue;
      threadIdx = {static_cast<unsigned>(current % threads_in_block), 0, 0};
      blockIdx = {static_cast<unsigned>(first_block + current / threads_in_block), 0, 0};
      resume(fibers[current]);
      if (fibers[current].done) --left;
    }
    if (progress == before) fail("deadlock: not all threads reach a barrier");
  }
}

}  // namespace

int current;
int64_t progress;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// swapcontext() would do, with two system calls for each switch.
void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

Options& options() {
  static Options instance;
  return instance;
}

void write_late(const void* p, std::vector<char> before, const int32_t* flag) {
  char* const at = static_cast<char*>(const_cast<void*>(p));
  std::vector<char> after(at, at + before.size());
  late_writes.push_back({at, std::move(before), std::move(after), flag});
}

void wait_for_earlier_kernels() {
  if (fibers[current].waited) return;
  fibers[current].waited = true;
  ++progress;
  yield();  // the others may come here too before memory changes: it then changes once
}

void let_next_kernel_start() { block().next_kernel_runs = true; }

void clear_flag(int32_t* flag) {
  if (block().next_kernel_runs) fail("a flag is cleared when the next kernel may look at it");
  *flag = 0;
}

void raise_flag(int32_t* flag) {
  if (*flag != 0) fail("a flag was not cleared");
  *flag = 1;
}

void wait_for_flag(const int32_t* flag) {
  while (*flag == 0) yield();
  if (!warp_flags[current / 32].insert(flag).second) return;
  ++progress;
  yield();
}

void sync_block() { wait(block().all, threads_in_block); }

bool sync_block_or(bool predicate) {
  Meeting& all = block().all;
  if (all.arrived == 0) all.or_next = false;
  all.or_next |= predicate;
  wait(all, threads_in_block);
  return all.or_result;
}

int cluster_rank() { return current / threads_in_block; }

void arrive_in_cluster() {
  fibers[current].cluster_phase = cluster_meeting.generation;
  arrive(cluster_meeting, threads_in_cluster);
}

void wait_for_cluster() {
  while (cluster_meeting.generation == fibers[current].cluster_phase) yield();
  stall();
}

void sync_warp() { wait(warp_meetings[current / 32], 32); }

void sync_some(int id, int threads) { wait(block().named[id], threads); }

void arrive_some(int id, int threads) { arrive(block().named[id], threads); }

int lane() { return current % 32; }

const void* const* exchange(const void* own) {
  exchanged[current] = own;
  sync_warp();
  return exchanged.data() + current / 32 * 32;
}

unsigned ballot(bool predicate) {
  const void* const* all = exchange(predicate ? "" : nullptr);
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= all[i] ? 1u << i : 0u;
  sync_warp();
  return result;
}

unsigned char* dynamic_shared() { return shared_of(cluster_rank()); }
unsigned char* shared_of(int rank) { return cluster[rank].shared.get(); }
void check_store_to(int rank) {
  if (rank == cluster_rank()) fail("such a store goes to another CTA");
  if (cluster_meeting.generation == 0) fail("a store to a CTA that may not have started");
  if (cluster[rank].left == 0) fail("a store to a CTA that has ended");
}

void run_grid(int64_t blocks, int threads, size_t shared_bytes, int cluster_blocks,
              const std::function<void()>& body) {
  if (static_cast<int>(shared_bytes) > cuda::device_limits().shared_per_block)
    fail("too much shared memory");
  threads_in_block = threads;
  threads_in_cluster = threads * cluster_blocks;
  if (fibers.size() < static_cast<size_t>(threads_in_cluster))
    fibers = std::vector<Fiber>(threads_in_cluster);
  exchanged.resize(fibers.size());
  kernel_body = &body;
  gridDim = dim3(static_cast<unsigned>(blocks));
  blockDim = dim3(static_cast<unsigned>(threads));
  for (int64_t first = 0; first < blocks; first += cluster_blocks) {
    cluster_meeting = {};
    warp_meetings.assign(threads_in_cluster / 32, {});
    warp_flags.assign(threads_in_cluster / 32, {});
    forget_barriers(threads_in_cluster);
    cluster = std::vector<Block>(cluster_blocks);
    for (Block& b : cluster) {
      b.left = threads;
      b.shared.reset(static_cast<unsigned char*>(
          std::aligned_alloc(1024, (shared_bytes + 1023) / 1024 * 1024)));
      std::memset(b.shared.get(), 0xff, shared_bytes);  // NaN in every dtype
    }
    run_cluster(first);
  }
  late_writes.clear();  // done: every thread has waited
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

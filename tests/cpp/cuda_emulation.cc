// Fibers jump from stack to stack, which the checked longjmp takes for a mistake.
#undef _FORTIFY_SOURCE

#include "cuda_emulation.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "../../csrc/cuda/device_limits.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace directkv::emulation {
namespace {

constexpr size_t kStackBytes = 128 * 1024;

struct Copy {
  void* to;
  std::vector<unsigned char> data;
};

// A barrier of threads.
struct Meeting {
  int arrived = 0;
  int64_t generation = 0;
  bool or_next = false, or_result = false;
};

// A barrier in shared memory.
struct Phases {
  int arrivals = 0, arrived = 0;
  int64_t expected_bytes = 0;
  int64_t over = 0;  // phases that ended
  std::vector<Copy> copies;
};

struct Fiber {
  ucontext_t context;  // of its start
  jmp_buf place;       // where it yielded
  bool started = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool done = false;
  bool waited = false;        // for earlier kernels
  int64_t cluster_phase = 0;  // the one it arrived in
  std::vector<Copy> copies;   // of 16 bytes, not yet tied to a barrier
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
int current, threads_in_block, threads_in_cluster;
std::vector<Block> cluster;
Meeting cluster_meeting;
std::vector<Meeting> warp_meetings;
std::map<const Barrier*, Phases> phases;
std::vector<const void*> exchanged;
const std::function<void()>* kernel_body;
std::vector<LateWrite> late_writes;
std::vector<std::set<const int32_t*>> warp_flags;  // that a warp has waited for
int64_t progress;                                  // barriers reached and passed, threads ended

Block& block() { return cluster[current / threads_in_block]; }

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// swapcontext() would do, with two system calls for each switch.
void yield() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

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
  if (!fibers[current].copies.empty()) fail("a thread ended with copies in flight");
  yield();
}

void land(std::vector<Copy>& copies) {
  for (const Copy& c : copies) std::memcpy(c.to, c.data.data(), c.data.size());
  copies.clear();
}

Phases& find(const Barrier* barrier) {
  const auto found = phases.find(barrier);
  if (found == phases.end()) fail("a barrier was not initialised");
  return found->second;
}

void start(std::vector<Copy>& copies, void* to, const void* from, size_t bytes) {
  const auto* data = static_cast<const unsigned char*>(from);
  copies.push_back({to, {data, data + bytes}});
  if (!options().late_copies) std::memcpy(to, from, bytes);
}

void arrive(Phases& p) {
  if (++p.arrived > p.arrivals) fail("more arrivals at a barrier than announced");
  ++progress;
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

ClusterFloats::ClusterFloats(const float* floats, const Barrier* barrier, int rank) : rank_(rank) {
  const auto there = [&](const void* here) {
    return cluster[rank].shared.get() +
           (static_cast<const unsigned char*>(here) - block().shared.get());
  };
  floats_ = reinterpret_cast<float*>(there(floats));
  barrier_ = reinterpret_cast<const Barrier*>(there(barrier));
}

void ClusterFloats::store(int i, float value) const {
  if (rank_ == cluster_rank()) fail("such a store goes to another CTA");
  if (cluster_meeting.generation == 0) fail("a store to a CTA that may not have started");
  if (cluster[rank_].left == 0) fail("a store to a CTA that has ended");
  start(find(barrier_).copies, floats_ + i, &value, sizeof(value));
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

unsigned char* dynamic_shared() { return block().shared.get(); }

void copy_async_16(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0)
    fail("misaligned asynchronous copy");
  start(fibers[current].copies, to, from, 16);
}

void copy_async_16_or_zeros(void* to, const void* from, bool there) {
  alignas(16) static const unsigned char zeros[16] = {};
  copy_async_16(to, there ? from : zeros);
}

void barrier_init(Barrier* barrier, int arrivals) {
  phases[barrier] = {};
  phases[barrier].arrivals = arrivals;
}

void barrier_arrive(Barrier* barrier) { arrive(find(barrier)); }
void barrier_arrive_after(uint32_t, Barrier* barrier) { arrive(find(barrier)); }

void barrier_arrive_expecting(Barrier* barrier, int bytes) {
  Phases& p = find(barrier);
  p.expected_bytes += bytes;
  arrive(p);
}

void barrier_arrive_after_copies(Barrier* barrier) {
  Phases& p = find(barrier);
  for (Copy& c : fibers[current].copies) {
    p.expected_bytes += static_cast<int64_t>(c.data.size());
    p.copies.push_back(std::move(c));
  }
  fibers[current].copies.clear();
  arrive(p);
}

void barrier_wait(Barrier* barrier, unsigned parity) {
  Phases& p = find(barrier);
  // The phase before the first counts as one of parity 1.
  while ((p.over + 1) % 2 != static_cast<int64_t>(parity)) {
    int64_t bytes = 0;
    for (const Copy& c : p.copies) bytes += static_cast<int64_t>(c.data.size());
    if (p.arrived == p.arrivals && bytes == p.expected_bytes) {
      land(p.copies);
      p.arrived = 0;
      p.expected_bytes = 0;
      ++p.over;
      ++progress;
    } else {
      if (p.arrived == p.arrivals && bytes > p.expected_bytes)
        fail("more bytes copied than announced");
      yield();
    }
  }
}

void copy_run(void* shared, const void* global, int bytes, Barrier* barrier) {
  if ((reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global) | bytes) % 16 != 0)
    fail("misaligned bulk copy");
  start(find(barrier).copies, shared, global, bytes);
}

void copy_box(void* shared, const TileMap* map, int row, int tile, int span, Barrier* barrier) {
  const int pieces = map->span_bytes / 16;
  if (reinterpret_cast<uintptr_t>(shared) % 128 != 0) fail("misaligned bulk copy");
  if (row < 0 || row + map->box_tokens > 2 * map->page_size || tile < 0 || tile >= map->tiles)
    fail("a bulk copy leaves its tile");
  auto* const to = static_cast<unsigned char*>(shared);
  for (int s = 0; s < map->box_spans; ++s)
    for (int t = 0; t < map->box_tokens; ++t)
      for (int i = 0; i < pieces; ++i) {
        const int64_t from = (int64_t{tile} * 2 * map->page_size + row + t) * map->row_bytes +
                             (span + s) * map->span_bytes + 16 * i;
        // The engine swizzles by address: the 128-byte line chooses.
        unsigned char* const line = to + (s * map->box_tokens + t) * map->span_bytes;
        const int swizzle = static_cast<int>(reinterpret_cast<uintptr_t>(line) / 128 % 8);
        start(find(barrier).copies, line + 16 * (i ^ swizzle), map->pages + from, 16);
      }
}

void copy_box_at(void* shared, const BoxMap* map, int x, int y, int z, Barrier* barrier) {
  const int pieces = map->box_x / 8;
  if (map->size_x % 8 != 0 || map->box_x % 8 != 0 || (pieces != 2 && pieces != 4 && pieces != 8))
    fail("not a map");
  if (reinterpret_cast<uintptr_t>(shared) % (128 * pieces) != 0) fail("misaligned bulk copy");
  static const unsigned char zeros[16] = {};
  auto* line = static_cast<unsigned char*>(shared);
  for (int k = z; k < z + map->box_z; ++k)
    for (int j = y; j < y + map->box_y; ++j, line += 16 * pieces)
      for (int i = 0; i < pieces; ++i) {
        const int at = x + 8 * i;
        const bool there = k < map->size_z && j < map->size_y && at < map->size_x;
        const int64_t element = (int64_t{k} * map->size_y + j) * map->size_x + at;
        const int swizzle = static_cast<int>(reinterpret_cast<uintptr_t>(line) / 128 % pieces);
        start(find(barrier).copies, line + 16 * (i ^ swizzle),
              there ? map->array + 2 * element : zeros, 16);
      }
}

void copy_tokens(void* shared, const TokenMap* map, int token, int span, int row,
                 Barrier* barrier) {
  if (reinterpret_cast<uintptr_t>(shared) % 1024 != 0) fail("misaligned bulk copy");
  if (token < 0 || row < 0 || row >= map->batch || (span + 1) * 128 > map->token_bytes)
    fail("a bulk copy of tokens leaves its array");
  static const unsigned char zeros[16] = {};
  for (int s = 0; s < map->head_bytes / 128; ++s)
    for (int t = 0; t < map->box_tokens; ++t)
      for (int i = 0; i < 8; ++i) {
        const unsigned char* const from =
            map->tokens + (int64_t{row} * map->count + token + t) * map->token_bytes +
            (span + s) * 128 + 16 * i;
        auto* const line = static_cast<unsigned char*>(shared) + (s * map->box_tokens + t) * 128;
        start(find(barrier).copies, line + 16 * (i ^ t % 8), token + t < map->count ? from : zeros,
              16);
      }
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
    phases.clear();
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

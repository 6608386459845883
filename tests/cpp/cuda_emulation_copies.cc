// Barriers in shared memory, and the asynchronous copies that arrive at them.
#include <map>
#include <utility>

#include "cuda_emulation_threads.h"

namespace directkv::emulation {
namespace {

struct Copy {
  void* to;
  std::vector<unsigned char> data;
};

// A barrier.
struct Phases {
  int arrivals = 0, arrived = 0;
  int64_t expected_bytes = 0;
  int64_t over = 0;  // phases that ended
  std::vector<Copy> copies;
};

std::map<const Barrier*, Phases> phases;
std::vector<std::vector<Copy>> own_copies;  // of a thread: 16 bytes each, not yet tied to a barrier

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

}  // namespace

void forget_barriers(int threads) {
  phases.clear();
  own_copies.assign(threads, {});
}

bool copies_in_flight() { return !own_copies[current].empty(); }

ClusterFloats::ClusterFloats(const float* floats, const Barrier* barrier, int rank) : rank_(rank) {
  const auto there = [&](const void* here) {
    return shared_of(rank) + (static_cast<const unsigned char*>(here) - dynamic_shared());
  };
  floats_ = reinterpret_cast<float*>(there(floats));
  barrier_ = reinterpret_cast<const Barrier*>(there(barrier));
}

void ClusterFloats::store(int i, float value) const {
  check_store_to(rank_);
  start(find(barrier_).copies, floats_ + i, &value, sizeof(value));
}

void copy_async_16(void* to, const void* from) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 16 != 0)
    fail("misaligned asynchronous copy");
  start(own_copies[current], to, from, 16);
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
  for (Copy& c : own_copies[current]) {
    p.expected_bytes += static_cast<int64_t>(c.data.size());
    p.copies.push_back(std::move(c));
  }
  own_copies[current].clear();
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

}  // namespace directkv::emulation

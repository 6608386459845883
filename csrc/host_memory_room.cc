#include "host_memory_room.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "host_memory_limit.h"

namespace directkv {
namespace {

constexpr auto kPatience = std::chrono::seconds(5);
constexpr auto kPoll = std::chrono::milliseconds(100);
constexpr int64_t kGrowthStep = int64_t{64} << 20;  // less than this is noise
// No virtual machine seen grows by more than 9 times; a request beyond this is refused untouched.
constexpr int64_t kLargestGrowth = 16;

bool overruled(const MemoryLimit& limit) { return limit.source == kMemoryLimitVariable; }

// Of a limit that we found ourselves a margin stays untouched.
int64_t usable(const MemoryLimit& limit) {
  return limit.available - (overruled(limit) ? 0 : memory_margin(limit.limit));
}

std::string shortage(size_t asked, size_t taken, const MemoryLimit& limit) {
  std::string text = "page-locked host memory: asked for " + gib(asked) + " (" +
                     std::to_string(asked) + " bytes), but only " + gib(limit.available) +
                     " are available of a limit of " + gib(limit.limit) + " (" + limit.source + ")";
  if (taken > 0) text += " after the first " + gib(taken) + ", which were given back";
  if (!overruled(limit)) text += "; " + gib(memory_margin(limit.limit)) + " of that stay untouched";
  return text + ". Make the cache smaller (batch, max_length, num_pages), or set " +
         kMemoryLimitVariable + " to what it may use.";
}

// What the machine itself leaves, whatever limits are set.
MemoryLimit machine_limit(const MachineMemory& machine) {
  return {machine.available, machine.total, kMemTotalSource};
}

bool is_machine(const MemoryLimit& limit) { return limit.source == kMemTotalSource; }

}  // namespace

std::string gib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.2f GiB", bytes / double(int64_t{1} << 30));
  return text;
}

bool memory_plausible(int64_t bytes, std::string* error) {
  const MemoryLimit limit = host_memory_limit();
  const MachineMemory machine = machine_memory();
  if (!is_machine(limit) && usable(limit) < bytes) {
    *error = shortage(bytes, 0, limit);
    return false;
  }
  const MemoryLimit whole = machine_limit(machine);
  const bool fits = !machine.may_grow   ? bytes <= usable(whole)
                    : is_machine(limit) ? bytes / kLargestGrowth <= machine.total
                                        : true;
  if (!fits) *error = shortage(bytes, 0, whole);
  return fits;
}

bool wait_for_memory(int64_t bytes, size_t asked, size_t taken, std::string* error) {
  auto give_up = std::chrono::steady_clock::now() + kPatience;
  int64_t most_available = 0, most_total = 0;
  while (true) {
    const MemoryLimit limit = host_memory_limit();
    if (!is_machine(limit) && usable(limit) < bytes) {
      *error = shortage(asked, taken, limit);
      return false;
    }
    const MachineMemory machine = machine_memory();
    const MemoryLimit whole = machine_limit(machine);
    if (usable(whole) >= bytes) return true;
    const auto now = std::chrono::steady_clock::now();
    if (machine.total > most_total || machine.available > most_available + kGrowthStep) {
      give_up = now + kPatience;
      most_total = std::max(most_total, machine.total);
      most_available = std::max(most_available, machine.available);
    }
    if (!machine.may_grow || now >= give_up) {
      // Told that there is more than MemTotal, on a machine where that is possible: believe it.
      if (machine.may_grow && overruled(limit) && limit.limit > machine.total) return true;
      *error = shortage(asked, taken, whole);
      return false;
    }
    std::this_thread::sleep_for(kPoll);
  }
}

}  // namespace directkv

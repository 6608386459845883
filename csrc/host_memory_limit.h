// How much host memory may still be taken, read from the files Linux offers. No CUDA here.
#pragma once

#include <cstdint>
#include <string>

#include "host_pool.h"

namespace directkv {

// Overrules every limit below, in GiB: for machines that report less than they have, or to keep
// memory for others.
inline constexpr char kMemoryLimitVariable[] = "DIRECTKV_HOST_MEMORY_LIMIT_GB";
inline constexpr char kMemTotalSource[] = "MemTotal";

struct MachineMemory {
  int64_t total, available;  // MemTotal, MemAvailable; INT64_MAX where unknown
  // A virtual machine whose memory may be enlarged while it runs (balloon, hot plug): MemTotal is
  // then no bound on what fits.
  bool may_grow;
};

// `root` is prefixed to /proc and /sys: "" but in tests.
MachineMemory machine_memory(const std::string& root = "");

// The limit that binds: the variable if `overruling` > 0 (bytes; `held` of them are in pools
// already), else the tightest control group or MemTotal, whichever leaves less. Where MemTotal may
// grow, a control group's limit above it is taken at its word.
MemoryLimit host_memory_limit(const std::string& root, int64_t overruling, int64_t held);

// Value of kMemoryLimitVariable in bytes; 0 where unset or not a positive number.
int64_t overruling_limit();

// Bytes in the pools of this process.
int64_t pool_bytes_held();
void add_pool_bytes(int64_t bytes);  // negative when freed

// What is left untouched so that the process and its neighbours live on.
int64_t memory_margin(int64_t limit);

}  // namespace directkv

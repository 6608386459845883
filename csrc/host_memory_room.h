// Whether a pool of host memory fits, asked before its memory is touched.
//
// A machine without memory to spare does not refuse, it kills: Linux hands out address space freely
// and looks for pages at the first touch; when there are none, the process (or a neighbour) dies.
// So a pool is touched slice by slice, before each slice the memory that is left is read anew, and
// a slice that would not leave the margin is not touched.
//
// MemTotal alone is no measure: some virtual machines start small and are enlarged while memory is
// touched (31 GiB that become 128). There a control group's limit, where one is set, is the true
// bound; before each slice MemAvailable must still hold it, and when it does not, the machine is
// given time: as long as it keeps growing, then a few seconds more. Bare metal is refused at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace directkv {

// Can `bytes` be had at all? Says no where touching memory to find out would be of no use.
bool memory_plausible(int64_t bytes, std::string* error);

// Waits until `bytes` more can be touched, for a pool of `asked` bytes that has `taken` already.
// False, with the error, where they cannot.
bool wait_for_memory(int64_t bytes, size_t asked, size_t taken, std::string* error);

std::string gib(int64_t bytes);  // "1.50 GiB"

}  // namespace directkv

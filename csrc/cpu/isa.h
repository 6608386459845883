// Which instruction set's kernel runs.
#pragma once

#include <vector>

#include "row_block.h"

namespace directkv::cpu {

// Best first: what this build has and this machine can run. Never empty.
const std::vector<const IsaKernel*>& available_kernels();

// The kernel in use: DIRECTKV_CPU_ISA by name at the first call, else the best.
const IsaKernel& active_kernel();

// For tests: makes `name` the active kernel; false, and no change, where it is not available.
bool select_kernel(const char* name);

}  // namespace directkv::cpu

// The compiler's default flags on any architecture; scalar code under DIRECTKV_NO_SIMD.
#include "attend_rows.h"

namespace directkv::cpu {

const IsaKernel* baseline_kernel() {
#if defined(__aarch64__) && !defined(DIRECTKV_NO_SIMD)
  static const IsaKernel kernel = {"neon", attend_rows};
#else
  static const IsaKernel kernel = {"baseline", attend_rows};
#endif
  return &kernel;
}

}  // namespace directkv::cpu

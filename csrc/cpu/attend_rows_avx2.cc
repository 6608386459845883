// AVX2, FMA and F16C: CMakeLists.txt gives this file its -m flags.
#include "row_block.h"

#if !defined(DIRECTKV_NO_SIMD) && defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "attend_rows.h"

namespace directkv::cpu {

const IsaKernel* avx2_kernel() {
  static const IsaKernel kernel = {"avx2", attend_rows};
  return &kernel;
}

}  // namespace directkv::cpu
#else
namespace directkv::cpu {
const IsaKernel* avx2_kernel() { return nullptr; }
}  // namespace directkv::cpu
#endif

// AVX-512 F, BW, DQ and VL: CMakeLists.txt gives this file its -m flags.
#include "row_block.h"

#if !defined(DIRECTKV_NO_SIMD) && defined(__AVX512F__) && defined(__AVX512BW__)
#include "attend_rows.h"

namespace directkv::cpu {

const IsaKernel* avx512_kernel() {
  static const IsaKernel kernel = {"avx512", attend_rows};
  return &kernel;
}

}  // namespace directkv::cpu
#else
namespace directkv::cpu {
const IsaKernel* avx512_kernel() { return nullptr; }
}  // namespace directkv::cpu
#endif

// AVX-512 with bfloat16 dot products: CMakeLists.txt gives this file its -m flags.
#include "row_block.h"

#if !defined(DIRECTKV_NO_SIMD) && defined(__AVX512F__) && defined(__AVX512BF16__)
#include "attend_rows.h"

namespace directkv::cpu {

const IsaKernel* avx512bf16_kernel() {
  static const IsaKernel kernel = {"avx512bf16", attend_rows};
  return &kernel;
}

}  // namespace directkv::cpu
#else
namespace directkv::cpu {
const IsaKernel* avx512bf16_kernel() { return nullptr; }
}  // namespace directkv::cpu
#endif

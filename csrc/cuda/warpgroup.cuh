// Matrix instructions of a warpgroup (compute capability 9.0 alone): 64 rows at once, operands in
// shared memory, carried out asynchronously.
//
// Operands lie in spans of 64 elements (tile_map.cuh): all rows of a span one after the other, 128
// bytes each, the 16-byte pieces swizzled by the row. Fragments of the result are those of
// matrix.cuh for each warp's 16 rows: c[4 n + e] is column 8 n + 2 q + e % 2 of row g + 8 (e / 2).
#pragma once

#include "matrix.cuh"

// Compiled for that part, or emulated.
#if defined(DIRECTKV_EMULATE_CUDA) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DIRECTKV_WARPGROUPS 1
#else
#define DIRECTKV_WARPGROUPS 0
#endif

namespace directkv::cuda {

constexpr int kWarpgroup = 128;  // threads

// 64 x 16 or N x 16 elements of rows, or with `transposed` 16 rows of N elements.
struct SharedMatrix {
#if defined(DIRECTKV_EMULATE_CUDA)
  const unsigned char* at;
  int span_stride;
#else
  uint64_t descriptor;
#endif
};

// Rows from `at` on, a multiple of 8 of them into a span; 16 elements from a multiple of 16 on.
__device__ __forceinline__ SharedMatrix rows_matrix(const unsigned char* at) {
#if defined(DIRECTKV_EMULATE_CUDA)
  return {at, 0};
#else
  // Swizzle of 128 bytes, 1024 bytes from 8 rows to the next.
  return {(shared_address(at) & 0x3ffffu) >> 4 | uint64_t{1} << 16 | uint64_t{1024 >> 4} << 32 |
          uint64_t{1} << 62};
#endif
}

// 16 rows from `at` on, all columns: spans of 64 are `span_stride` bytes apart.
__device__ __forceinline__ SharedMatrix columns_matrix(const unsigned char* at, int span_stride) {
#if defined(DIRECTKV_EMULATE_CUDA)
  return {at, span_stride};
#else
  return {(shared_address(at) & 0x3ffffu) >> 4 | static_cast<uint64_t>(span_stride >> 4) << 16 |
          uint64_t{1024 >> 4} << 32 | uint64_t{1} << 62};
#endif
}

#if defined(DIRECTKV_EMULATE_CUDA)

template <int kLeft>
void give_registers() {}
template <int kCount>
void take_registers() {}
inline void warpgroup_begin() {}
inline void warpgroup_commit() {}
template <int kLeft>
void warpgroup_wait() {}
template <int kCount>
void keep(float (&)[kCount]) {}
template <int kCount>
void keep(uint32_t (&)[kCount]) {}

// Element (row, element) of rows that begin at `at`; what the hardware's swizzle by address does.
template <DType kDType>
float shared_element(const unsigned char* at, int row, int element) {
  using E = std::conditional_t<kDType == DType::kBF16, __nv_bfloat16, __half>;
  const auto linear = reinterpret_cast<uintptr_t>(at) + 128 * row + 2 * element;
  E x;
  std::memcpy(&x, reinterpret_cast<const void*>(linear ^ (linear >> 7 & 7) << 4), 2);
  return static_cast<float>(x);
}

template <DType kDType, int kN>
void multiply_rows(float (&c)[kN / 2], SharedMatrix a, SharedMatrix b, bool add) {
  const int lane = emulation::lane(), warp = static_cast<int>(threadIdx.x) / 32 % 4;
  for (int i = 0; i < kN / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = add ? c[i] : 0.0f;
    for (int k = 0; k < 16; ++k)
      sum += shared_element<kDType>(a.at, row, k) * shared_element<kDType>(b.at, column, k);
    c[i] = sum;
  }
}

template <DType kDType, int kN>
void multiply_columns(float (&c)[kN / 2], const uint32_t (&a)[4], SharedMatrix b) {
  using E = std::conditional_t<kDType == DType::kBF16, __nv_bfloat16, __half>;
  E own[4][2];
  std::memcpy(own, a, sizeof(own));
  const void* const* all = emulation::exchange(&own);
  const int lane = emulation::lane();
  for (int i = 0; i < kN / 2; ++i) {
    const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const auto* const from = static_cast<const E(*)[2]>(all[row % 8 * 4 + k % 8 / 2]);
      c[i] += static_cast<float>(from[row / 8 + k / 8 * 2][k % 2]) *
              shared_element<kDType>(b.at + column / 64 * b.span_stride, k, column % 64);
    }
  }
  emulation::sync_warp();
}

#else

// A warpgroup keeps kLeft registers for each thread; another takes what has been given.
template <int kLeft>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kLeft));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Before the first instruction, and after registers it uses were written.
__device__ __forceinline__ void warpgroup_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Ends a batch of instructions.
__device__ __forceinline__ void warpgroup_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most kLeft batches are still going on. What a batch reads and writes must be kept
// across.
template <int kLeft>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// Tells the compiler that registers are in use up to here, and new from here on.
template <int kCount>
__device__ __forceinline__ void keep(float (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void keep(uint32_t (&r)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}

#define DIRECTKV_NAMES_32                                                                  \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23," \
  "%24,%25,%26,%27,%28,%29,%30,%31"
#define DIRECTKV_NAMES_64                                                                     \
  DIRECTKV_NAMES_32                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
  "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define DIRECTKV_NAMES_128                                                                    \
  DIRECTKV_NAMES_64                                                                           \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85," \
  "%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,"    \
  "%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,"     \
  "%123,%124,%125,%126,%127"
#define DIRECTKV_SUMS_8(i)                                                                    \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
      "+f"(c[i + 6]), "+f"(c[i + 7])
#define DIRECTKV_SUMS_32(i) \
  DIRECTKV_SUMS_8(i), DIRECTKV_SUMS_8(i + 8), DIRECTKV_SUMS_8(i + 16), DIRECTKV_SUMS_8(i + 24)
#define DIRECTKV_SUMS_64(i) DIRECTKV_SUMS_32(i), DIRECTKV_SUMS_32(i + 32)
#define DIRECTKV_SUMS_128(i) DIRECTKV_SUMS_64(i), DIRECTKV_SUMS_64(i + 64)

#define DIRECTKV_MULTIPLY_ROWS(n, count, type, a_name, b_name, add_name)                   \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add_name                              \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type        \
               " {" DIRECTKV_NAMES_##count "}, " a_name ", " b_name ", add, 1, 1, 0, 0; }" \
               : DIRECTKV_SUMS_##count(0)                                                  \
               : "l"(a.descriptor), "l"(b.descriptor), "r"(static_cast<int>(add)))
#define DIRECTKV_MULTIPLY_COLUMNS(n, count, type, a0, a1, a2, a3, b_name, add_name)    \
  asm volatile("{ .reg .pred add; setp.ne.b32 add, " add_name                          \
               ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type    \
               " {" DIRECTKV_NAMES_##count "}, {" a0 "," a1 "," a2 "," a3 "}, " b_name \
                                           ", add, 1, 1, 1; }"                         \
               : DIRECTKV_SUMS_##count(0)                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.descriptor), "r"(1))

// c (+)= a b^T: 64 rows of a, kN rows of b, 16 elements of each.
template <DType kDType, int kN>
__device__ __forceinline__ void multiply_rows(float (&c)[kN / 2], SharedMatrix a, SharedMatrix b,
                                              bool add) {
  static_assert(kN == 64 || kN == 128, "tokens of a tile");
  if constexpr (kN == 64 && kDType == DType::kBF16) {
    DIRECTKV_MULTIPLY_ROWS(64, 32, "bf16", "%32", "%33", "%34");
  } else if constexpr (kN == 64) {
    DIRECTKV_MULTIPLY_ROWS(64, 32, "f16", "%32", "%33", "%34");
  } else if constexpr (kDType == DType::kBF16) {
    DIRECTKV_MULTIPLY_ROWS(128, 64, "bf16", "%64", "%65", "%66");
  } else {
    DIRECTKV_MULTIPLY_ROWS(128, 64, "f16", "%64", "%65", "%66");
  }
}

// c += a b: 64 rows of a, 16 elements each in registers, and as many rows of b of kN elements.
template <DType kDType, int kN>
__device__ __forceinline__ void multiply_columns(float (&c)[kN / 2], const uint32_t (&a)[4],
                                                 SharedMatrix b) {
  static_assert(kN == 64 || kN == 128 || kN == 256, "head dim");
  if constexpr (kN == 64 && kDType == DType::kBF16) {
    DIRECTKV_MULTIPLY_COLUMNS(64, 32, "bf16", "%32", "%33", "%34", "%35", "%36", "%37");
  } else if constexpr (kN == 64) {
    DIRECTKV_MULTIPLY_COLUMNS(64, 32, "f16", "%32", "%33", "%34", "%35", "%36", "%37");
  } else if constexpr (kN == 128 && kDType == DType::kBF16) {
    DIRECTKV_MULTIPLY_COLUMNS(128, 64, "bf16", "%64", "%65", "%66", "%67", "%68", "%69");
  } else if constexpr (kN == 128) {
    DIRECTKV_MULTIPLY_COLUMNS(128, 64, "f16", "%64", "%65", "%66", "%67", "%68", "%69");
  } else if constexpr (kDType == DType::kBF16) {
    DIRECTKV_MULTIPLY_COLUMNS(256, 128, "bf16", "%128", "%129", "%130", "%131", "%132", "%133");
  } else {
    DIRECTKV_MULTIPLY_COLUMNS(256, 128, "f16", "%128", "%129", "%130", "%131", "%132", "%133");
  }
}

#endif

}  // namespace directkv::cuda

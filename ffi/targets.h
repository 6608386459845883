// The FFI targets: their names, and the handler symbol behind each. The only file that names them;
// `directkv_jax/_native.py` holds the same names for the calling side.
//
// Operands, results and attributes are the same on every platform:
//   directkv_attend       query key value pages page_table lengths seq_lengths layer
//                         -> out lse workspace   {page_size host tracked scale soft_cap
//                         window_left num_ctas}
//   directkv_append       pages key value page_table lengths seq_lengths layer after
//                         -> pages (aliased)     {page_size host tracked}
//   directkv_read_pages   pages page_ids      -> data             {page_size host tracked}
//   directkv_write_pages  pages data page_ids -> pages (aliased)  {page_size host tracked}
//
// Only in the CUDA module:
//   directkv_qkv_attend   x kernel bias query_norm key_norm cos sin pages page_table lengths
//                         seq_lengths layer -> out lse query key value workspace
//                         {as directkv_attend, norm_eps norm_offset}
// and for the benchmarks (csrc/cuda/bench):
//   directkv_bench_mark    x -> x (aliased)            {slot spin_us}
//   directkv_bench_read    data after -> checksums     {bytes}
//   directkv_naive_attend  query key_cache value_cache lengths
//                          -> out workspace            {host scale}
#pragma once

#include "xla/ffi/api/c_api.h"

#define DIRECTKV_TARGETS(V)                   \
  V("directkv_attend", DirectkvAttend)        \
  V("directkv_append", DirectkvAppend)        \
  V("directkv_read_pages", DirectkvReadPages) \
  V("directkv_write_pages", DirectkvWritePages)

#define DIRECTKV_CUDA_TARGETS(V) V("directkv_qkv_attend", DirectkvQkvAttend)

#define DIRECTKV_BENCH_TARGETS(V)             \
  V("directkv_bench_mark", DirectkvBenchMark) \
  V("directkv_bench_read", DirectkvBenchRead) \
  V("directkv_naive_attend", DirectkvNaiveAttend)

#define DIRECTKV_DECLARE_HANDLER(name, symbol) \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame);
DIRECTKV_TARGETS(DIRECTKV_DECLARE_HANDLER)
DIRECTKV_CUDA_TARGETS(DIRECTKV_DECLARE_HANDLER)
DIRECTKV_BENCH_TARGETS(DIRECTKV_DECLARE_HANDLER)
#undef DIRECTKV_DECLARE_HANDLER

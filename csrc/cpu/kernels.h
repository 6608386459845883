// The CPU kernels. Plain C++, no XLA: `Executor` is how a handler lends its thread pool.
#pragma once

#include <functional>

#include "../params.h"

namespace directkv::cpu {

// Runs tasks on other threads, some time, perhaps never while the caller waits: a pool whose
// threads all sit in handlers must not be waited for. `workers` == 0 means: only the caller works.
struct Executor {
  int workers = 0;
  std::function<void(std::function<void()>)> schedule;
};

void attend(const AttendParams& params, const Executor& executor);

// Partial softmax states over the cached tokens of pages [page_begin, page_end) of every row and,
// where `with_fresh`, over its fresh tokens too: m, l [B, T, N] and o [B, T, N, H] float32, see
// softmax_state.h. What a merge needs that splits one row between devices.
void attend_partial(const AttendParams& params, int page_begin, int page_end, bool with_fresh,
                    float* m, float* l, float* o, const Executor& executor);

void append(const AppendParams& params, const Executor& executor);
void read_pages(const PageCopyParams& params, const Executor& executor);
void write_pages(const PageCopyParams& params, const Executor& executor);

// The instruction set chosen at run time ("avx512", "avx2", "neon", "baseline"), and those this
// build has. DIRECTKV_CPU_ISA in the environment picks one by name.
const char* isa_name();
const char* isa_list();

}  // namespace directkv::cpu

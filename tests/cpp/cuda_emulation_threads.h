// What the two halves of the emulation tell each other: threads (cuda_emulation.cc), and barriers
// in shared memory with the copies they count (cuda_emulation_copies.cc).
#pragma once

#include "cuda_emulation.h"

namespace directkv::emulation {

extern int current;       // the thread that runs, of its cluster
extern int64_t progress;  // barriers reached and passed, threads ended

[[noreturn]] void fail(const char* what);
// Lets the next thread run.
void yield();

unsigned char* shared_of(int rank);  // of a CTA of the cluster
// Fails unless CTA `rank` is another one, which has started and has not ended.
void check_store_to(int rank);

// A cluster starts, of as many threads.
void forget_barriers(int threads);
// Of this thread.
bool copies_in_flight();

}  // namespace directkv::emulation

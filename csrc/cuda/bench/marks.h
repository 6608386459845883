// Device marks: CUDA events in numbered slots, as the Python side reads them. No CUDA types here.
#pragma once

#include <string>

namespace directkv::bench {

constexpr int kMarkSlots = 16;

// Milliseconds from mark `slot_a` to mark `slot_b`; waits for b. On failure negative, and `error`
// says why.
float elapsed_ms(int slot_a, int slot_b, std::string* error);

}  // namespace directkv::bench

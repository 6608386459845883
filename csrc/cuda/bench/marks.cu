#include <mutex>

#include "kernels.h"

namespace directkv::bench {
namespace {

std::mutex mutex;
cudaEvent_t events[kMarkSlots];  // created when first used; they live as long as the process

// %globaltimer counts nanoseconds, in steps of about a microsecond.
__global__ void spin_kernel(int64_t nanoseconds) {
  int64_t begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < nanoseconds);
}

}  // namespace

cudaError_t mark(int slot, int spin_us, cudaStream_t stream) {
  if (slot < 0 || slot >= kMarkSlots) return cudaErrorInvalidValue;
  if (spin_us > 0) {
    spin_kernel<<<1, 1, 0, stream>>>(int64_t{1000} * spin_us);
    if (auto status = cudaGetLastError(); status != cudaSuccess) return status;
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (!events[slot]) {
    if (auto status = cudaEventCreate(&events[slot]); status != cudaSuccess) return status;
  }
  return cudaEventRecord(events[slot], stream);
}

float elapsed_ms(int slot_a, int slot_b, std::string* error) {
  cudaEvent_t a = nullptr, b = nullptr;
  if (slot_a >= 0 && slot_a < kMarkSlots && slot_b >= 0 && slot_b < kMarkSlots) {
    const std::lock_guard<std::mutex> lock(mutex);
    a = events[slot_a];
    b = events[slot_b];
  }
  if (!a || !b) {
    *error = "no mark was set in slot " + std::to_string(a ? slot_b : slot_a);
    return -1;
  }
  float ms = -1;
  cudaError_t status = cudaEventSynchronize(b);
  if (status == cudaSuccess) status = cudaEventElapsedTime(&ms, a, b);
  if (status == cudaSuccess) return ms;
  cudaGetLastError();  // reported here, so not left pending
  *error = cudaGetErrorString(status);
  return -1;
}

}  // namespace directkv::bench

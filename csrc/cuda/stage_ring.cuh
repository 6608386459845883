// A ring of stages in shared memory for what one producer warp copies and other warps read.
#pragma once

#include "device.cuh"

namespace directkv::cuda {

// Both ends walk it in the same order. A stage has two barriers: the first ends a phase when it is
// full, the second when all consumer warps are done with it.
template <int kStages, int kBytes>
class StageRing {
 public:
  // `barriers`: 2 * kStages.
  __device__ __forceinline__ StageRing(unsigned char* storage, Barrier* barriers)
      : storage_(storage), barriers_(barriers) {}
  // One thread. `arrivals`: of the producer, for each stage.
  __device__ __forceinline__ void init(int arrivals, int consumer_warps) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(barriers_ + 2 * s, arrivals);
      barrier_init(barriers_ + 2 * s + 1, consumer_warps);
    }
  }
  __device__ __forceinline__ unsigned char* stage() const { return storage_ + at_ * kBytes; }
  __device__ __forceinline__ Barrier* full() const { return barriers_ + 2 * at_; }

  // Consumers: waits for the stage whose turn it is; gives it back, every warp. `loaded`: depends
  // on all loads of the stage whose results nothing has waited for.
  __device__ __forceinline__ unsigned char* take() const {
    barrier_wait(full(), parity_);
    __syncwarp();
    return stage();
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive(full() + 1);
    advance();
  }
  __device__ __forceinline__ void release_after(uint32_t loaded) {
    __syncwarp();
    if (lane_id() == 0) barrier_arrive_after(loaded, full() + 1);
    advance();
  }
  // The producer: waits until the stage is free; goes on to the next.
  __device__ __forceinline__ void acquire() const {
    barrier_wait(full() + 1, parity_ ^ 1);
    __syncwarp();
  }
  __device__ __forceinline__ void advance() {
    if (++at_ == kStages) {
      at_ = 0;
      parity_ ^= 1;
    }
  }

 private:
  unsigned char* storage_;
  Barrier* barriers_;
  int at_ = 0;
  unsigned parity_ = 0;
};

}  // namespace directkv::cuda

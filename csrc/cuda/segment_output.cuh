// Where the result of a segment goes: out and lse where the segment is a whole unit, else a partial
// state in the workspace.
#pragma once

#include "../softmax_state.h"
#include "attend_plan.h"
#include "elements.cuh"
#include "query_rows.cuh"

namespace directkv::cuda {

// Partial states in the workspace: o [slots, rows_per_block, H], then m and l [slots,
// rows_per_block], float32. CTA c has slot 2c for a segment that began in an earlier CTA and slot
// 2c + 1 for one that begins here and goes on in a later one.
struct PartialStates {
  float* o;
  float* m;
  float* l;
  int rows_per_block;

  __device__ __forceinline__ PartialStates(const AttendParams& p, const AttendGrid& grid)
      : o(static_cast<float*>(p.workspace)), rows_per_block(grid.rows_per_block) {
    const int64_t rows = int64_t{kSlotsPerCta} * grid.ctas * rows_per_block;
    m = o + rows * p.cache.layout.head_dim;
    l = m + rows;
  }
  static __device__ __forceinline__ int slot(int cta, bool begins_here) {
    return kSlotsPerCta * cta + (begins_here ? 1 : 0);
  }
  __device__ __forceinline__ int64_t row(int slot, int r) const {
    return int64_t{slot} * rows_per_block + r;
  }
};

template <DType kDType, int kHeadDim>
class SegmentOutput {
  using E = typename Element<kDType>::type;

 public:
  __device__ __forceinline__ SegmentOutput(const AttendParams& p, const AttendGrid& grid,
                                           const Segment& segment)
      : p_(p),
        partial_(p, grid),
        rows_(p, grid, segment),
        whole_(segment.whole()),
        slot_(PartialStates::slot(static_cast<int>(blockIdx.x), segment.tile_begin == 0)) {}

  // The place of one query row. Only one thread of those that write a row writes its state.
  class Row {
   public:
    __device__ __forceinline__ void put_state(SoftmaxState state) const {
      if (lse_) {
        *lse_ = logsumexp(state);
      } else {
        *m_ = state.m;
        *l_ = state.l;
      }
    }
    // Two neighbouring columns of the sums; `column` is even.
    __device__ __forceinline__ void put(int column, float a, float b) const {
      if (lse_) {
        struct alignas(2 * sizeof(E)) Pair {
          E a, b;
        };
        *reinterpret_cast<Pair*>(out_ + column) = {Element<kDType>::from_float(a * factor_),
                                                   Element<kDType>::from_float(b * factor_)};
      } else {
        *reinterpret_cast<float2*>(o_ + column) = make_float2(a, b);
      }
    }

   private:
    friend class SegmentOutput;
    float* lse_;  // null: a partial state
    E* out_;
    float factor_;  // 1 / sum of the weights
    float *o_, *m_, *l_;
  };

  __device__ __forceinline__ Row row(int r, SoftmaxState state) const {
    Row row;
    if (whole_) {
      const int64_t query = rows_.query(r);
      row.lse_ = p_.lse + query;
      row.out_ = static_cast<E*>(p_.out) + query * kHeadDim;
      row.factor_ = inverse_sum(state);
    } else {
      const int64_t at = partial_.row(slot_, r);
      row.lse_ = nullptr;
      row.o_ = partial_.o + at * kHeadDim;
      row.m_ = partial_.m + at;
      row.l_ = partial_.l + at;
    }
    return row;
  }

 private:
  const AttendParams& p_;
  PartialStates partial_;
  QueryRows rows_;
  bool whole_;
  int slot_;
};

}  // namespace directkv::cuda

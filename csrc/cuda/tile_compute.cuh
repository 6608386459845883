// Attention of one block of query rows over the tiles of its share, in float32 on the FMA units.
//
// Per tile: scores (every thread one token, a few rows, a slice of the head dim), softmax (a group
// of threads per row), values (every thread 4 columns of the output, a few rows, a slice of the
// tokens; the output stays in registers). __syncthreads() separates the three; TileRing::take()
// separates tiles. Tensor cores would take this header's place.
//
// Masks select and never multiply: a token that a row does not see has the weight kHidden, and its
// value, which may be NaN, is not touched for that row.
#pragma once

#include "../softmax_state.h"
#include "elements.cuh"
#include "tile_ring.cuh"

namespace directkv::cuda {

constexpr float kHidden = -1.0f;  // no exp() is negative

struct LogitOptions {
  float scale, soft_cap;
  int window_left;
};

// Where a query row comes from and where its partial state goes.
struct QueryRow {
  int64_t query;  // element offset in the query array
  int64_t slot;   // index in the workspace's m and l; times H in its o
  int token;      // t
};

// Maximum and sum over the kWidth lanes of a group; NaN survives the maximum.
template <int kWidth>
__device__ __forceinline__ float group_max(float x) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2)
    x = max_keep_nan(x, __shfl_xor_sync(kFullWarp, x, offset));
  return x;
}

template <int kWidth>
__device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(kFullWarp, x, offset);
  return x;
}

template <typename Shape>
class TileCompute {
 public:
  __device__ __forceinline__ TileCompute(unsigned char* shared, const LogitOptions& options,
                                         int rows)
      : query_(reinterpret_cast<float*>(shared + Shape::kQueryAt)),
        partial_(reinterpret_cast<float*>(shared + Shape::kPartialAt)),
        weight_(reinterpret_cast<float*>(shared + Shape::kWeightAt)),
        rescale_(reinterpret_cast<float*>(shared + Shape::kRescaleAt)),
        state_(reinterpret_cast<SoftmaxState*>(shared + Shape::kStateAt)),
        slot_(reinterpret_cast<int64_t*>(shared + Shape::kSlotAt)),
        token_(reinterpret_cast<int*>(shared + Shape::kTokenAt)),
        options_(options),
        rows_(rows) {
#pragma unroll
    for (int r = 0; r < Shape::kValueRows; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[r][e] = 0.0f;
  }

  // `row(r)` describes row r < rows. Rows that the block does not have are zeros of weight kHidden.
  // TileRing::take() makes the writes visible.
  template <typename Row>
  __device__ __forceinline__ void load_queries(const unsigned char* query, Row row) {
    constexpr int kQuads = Shape::kHeadDim / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kRows * kQuads; i += kAttendThreads) {
      const int r = i / kQuads, quad = i % kQuads;
      float q[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (r < rows_)
        load_floats<Shape::kDType>(query + (row(r).query + quad * 4) * Shape::kItem, q);
      *reinterpret_cast<float4*>(query_ + r * Shape::kHeadDim + quad * 4) =
          make_float4(q[0], q[1], q[2], q[3]);
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kTokens * Shape::kWeightStride;
         i += kAttendThreads)
      weight_[i] = kHidden;
    static_assert(Shape::kRows <= kAttendThreads, "one thread per row");
    const int r = static_cast<int>(threadIdx.x);
    if (r < Shape::kRows) {
      rescale_[r] = 1.0f;
      state_[r] = empty_state();
      if (r < rows_) {
        slot_[r] = row(r).slot;
        token_[r] = row(r).token;
      }
    }
  }

  // Adds a tile. All threads of the CTA call it right after TileRing::take().
  __device__ __forceinline__ void add(const FetchedTile& tile) {
    scores(tile.count, tile.stage);
    __syncthreads();
    softmax(tile);
    __syncthreads();
    values(tile.count, tile.stage + Shape::kTokens * Shape::kTokenStride);
  }

  // Writes the partial states to the rows' slots. After TileRing::drain(): the queries' memory
  // becomes the accumulator of the slices.
  __device__ __forceinline__ void finish(float* m, float* l, float* o) {
    const int own = static_cast<int>(threadIdx.x);
    if (own < rows_) {
      m[slot_[own]] = state_[own].m;
      l[slot_[own]] = state_[own].l;
    }
    // One slice after the other, so that the order of the sum is fixed.
#pragma unroll 1
    for (int slice = 0; slice < Shape::kValueSlices; ++slice) {
      if (value_slice() == slice && value_row() < rows_) {
#pragma unroll
        for (int r = 0; r < Shape::kValueRows; ++r) {
          float* to = query_ + (value_row() + r) * Shape::kHeadDim + value_column();
#pragma unroll
          for (int e = 0; e < 4; ++e) to[e] = slice == 0 ? sum_[r][e] : to[e] + sum_[r][e];
        }
      }
      __syncthreads();
    }
    constexpr int kQuads = Shape::kHeadDim / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows_ * kQuads; i += kAttendThreads) {
      const int row = i / kQuads, quad = i % kQuads;
      *reinterpret_cast<float4*>(o + slot_[row] * Shape::kHeadDim + quad * 4) =
          *reinterpret_cast<const float4*>(query_ + row * Shape::kHeadDim + quad * 4);
    }
  }

 private:
  // With many rows one step is long enough, and two would not fit the registers.
  static constexpr int kUnroll = Shape::kRows >= 16 ? 1 : 2;

  // Roles of this thread, see TileShape.
  static __device__ __forceinline__ int token() {
    return static_cast<int>(threadIdx.x) % Shape::kTokens;
  }
  static __device__ __forceinline__ int group() {
    return static_cast<int>(threadIdx.x) / Shape::kTokens;
  }
  static __device__ __forceinline__ int value_set() {
    return static_cast<int>(threadIdx.x) / Shape::kUnits;
  }
  static __device__ __forceinline__ int value_column() {
    return static_cast<int>(threadIdx.x) % Shape::kUnits * 4;
  }
  static __device__ __forceinline__ int value_row() {
    return value_set() % Shape::kValueRowGroups * Shape::kValueRows;
  }
  // May be kValueSlices or more: then the thread has no part in it.
  static __device__ __forceinline__ int value_slice() {
    return value_set() / Shape::kValueRowGroups;
  }

  // partial_[slice][row][token]: dot products over one slice of the head dim.
  __device__ __forceinline__ void scores(int count, const unsigned char* keys) {
    const int slice = group() % Shape::kScoreSlices;
    const int row = group() / Shape::kScoreSlices * Shape::kScoreRows;
    if (token() >= count || row >= rows_) return;
    constexpr int kWidth = 16 / Shape::kItem;
    const unsigned char* key = keys + token() * Shape::kTokenStride;
    float dot[Shape::kScoreRows];
#pragma unroll
    for (int r = 0; r < Shape::kScoreRows; ++r) dot[r] = 0.0f;
#pragma unroll kUnroll
    for (int piece = slice; piece < Shape::kPieces; piece += Shape::kScoreSlices) {
      float k[kWidth];
      load_floats<Shape::kDType>(key + piece * 16, k);
#pragma unroll
      for (int r = 0; r < Shape::kScoreRows; ++r) {
        const float* q = query_ + (row + r) * Shape::kHeadDim + piece * kWidth;
#pragma unroll
        for (int e = 0; e < kWidth; e += 4) {
          const float4 q4 = *reinterpret_cast<const float4*>(q + e);
          dot[r] = fmaf(q4.x, k[e], dot[r]);
          dot[r] = fmaf(q4.y, k[e + 1], dot[r]);
          dot[r] = fmaf(q4.z, k[e + 2], dot[r]);
          dot[r] = fmaf(q4.w, k[e + 3], dot[r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Shape::kScoreRows; ++r)
      partial_[(slice * Shape::kRows + row + r) * Shape::kTokens + token()] = dot[r];
  }

  __device__ __forceinline__ void softmax(const FetchedTile& tile) {
    const int relative = tile.relative + token();
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * (32 / Shape::kTokens);
#pragma unroll 1
    for (int i = 0; i < Shape::kSoftmaxRows; ++i) {
      // The same in the whole warp, whose lanes shuffle below.
      if (warp_row + i * Shape::kGroups >= rows_) break;
      const int row = group() + i * Shape::kGroups;
      const bool has_row = row < rows_, has_token = token() < tile.count;
      const int t = has_row ? token_[row] : 0;
      const bool seen = has_row && has_token && relative <= t &&
                        (options_.window_left < 0 || relative >= t - options_.window_left);
      float logit = -INFINITY;
      if (seen) {
        float dot = 0.0f;
#pragma unroll
        for (int slice = 0; slice < Shape::kScoreSlices; ++slice)
          dot += partial_[(slice * Shape::kRows + row) * Shape::kTokens + token()];
        logit = dot * options_.scale;
        if (options_.soft_cap > 0.0f) logit = options_.soft_cap * tanhf(logit / options_.soft_cap);
      }
      const SoftmaxState old = has_row ? state_[row] : empty_state();
      SoftmaxState now;
      now.m = max_keep_nan(old.m, group_max<Shape::kTokens>(logit));
      const float weight = seen ? rescale(logit, now.m) : 0.0f;
      const float factor = rescale(old.m, now.m);
      now.l = old.l * factor + group_sum<Shape::kTokens>(weight);
      if (has_row && has_token)
        weight_[token() * Shape::kWeightStride + row] = seen ? weight : kHidden;
      __syncwarp();  // the whole group has read the old state
      if (has_row && token() == 0) {
        state_[row] = now;
        rescale_[row] = factor;
      }
    }
  }

  __device__ __forceinline__ void values(int count, const unsigned char* values) {
    if (value_slice() >= Shape::kValueSlices || value_row() >= rows_) return;
#pragma unroll
    for (int r = 0; r < Shape::kValueRows; r += 4) {
      const float4 factor = *reinterpret_cast<const float4*>(rescale_ + value_row() + r);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum_[r][e] *= factor.x;
        sum_[r + 1][e] *= factor.y;
        sum_[r + 2][e] *= factor.z;
        sum_[r + 3][e] *= factor.w;
      }
    }
    const unsigned char* column = values + value_column() * Shape::kItem;
#pragma unroll kUnroll
    for (int t = value_slice(); t < count; t += Shape::kValueSlices) {
      float v[4];
      load_floats<Shape::kDType>(column + t * Shape::kTokenStride, v);
      const float* weight = weight_ + t * Shape::kWeightStride + value_row();
#pragma unroll
      for (int r = 0; r < Shape::kValueRows; r += 4) {
        const float4 w = *reinterpret_cast<const float4*>(weight + r);
        add_value(sum_[r], w.x, v);
        add_value(sum_[r + 1], w.y, v);
        add_value(sum_[r + 2], w.z, v);
        add_value(sum_[r + 3], w.w, v);
      }
    }
  }

  static __device__ __forceinline__ void add_value(float (&sum)[4], float weight,
                                                   const float (&v)[4]) {
    if (weight == kHidden) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] = fmaf(weight, v[e], sum[e]);
  }

  float* query_;         // [kRows][H]
  float* partial_;       // [kScoreSlices][kRows][kTokens]
  float* weight_;        // [kTokens][kWeightStride]
  float* rescale_;       // [kRows]
  SoftmaxState* state_;  // [kRows]
  int64_t* slot_;        // [kRows]
  int* token_;           // [kRows]
  LogitOptions options_;
  int rows_;
  float sum_[Shape::kValueRows][4];
};

}  // namespace directkv::cuda

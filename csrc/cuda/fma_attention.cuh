// Attention of a block of query rows over the tiles of a segment, in float32 on the FMA units:
// exact products, which the tensor cores' float32 mode does not have.
//
// Per tile: scores (every thread one token, a few rows, a slice of the head dim), softmax (a group
// of threads per row), values (every thread 4 columns of the output, a few rows, a slice of the
// tokens; the output stays in registers), with barriers of the consumer warps between them.
//
// Masks select and never multiply: a token that a row does not see has the weight kHidden, and its
// value, which may be NaN, is not touched for that row.
#pragma once

#include "../softmax_state.h"
#include "segment_output.cuh"
#include "tile_ring.cuh"

namespace directkv::cuda {

constexpr float kHidden = -1.0f;  // no exp() is negative

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

// kRows: query rows a CTA has room for.
template <DType kDType, int kHeadDim, int kRows>
class FmaAttention {
 public:
  using Shape = TileShape<kDType, kHeadDim>;
  using Output = SegmentOutput<kDType, kHeadDim>;
  static constexpr int kWarps = 8;
  static constexpr int kCtasPerSm = 1;

 private:
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTokens = Shape::kTokens, kPieces = Shape::kPieces;

  // Scores: kGroups groups of kTokens threads, one thread per token. A group takes kScoreRows query
  // rows and every kScoreSlices-th piece of the head dim.
  static constexpr int kGroups = kThreads / kTokens;
  static constexpr int kScoreRows = kRows < 8 ? kRows : 8;
  static constexpr int kScoreSlices = kGroups / (kRows / kScoreRows);
  static_assert(kScoreSlices >= 1, "more row groups than thread groups");
  static constexpr int kSoftmaxRows = (kRows + kGroups - 1) / kGroups;  // rows a group reduces

  // Values: sets of kUnits threads, one thread per 4 elements of the head dim. A set takes
  // kValueRows query rows and every kValueSlices-th token.
  static constexpr int kUnits = kHeadDim / 4;
  static constexpr int kSets = kThreads / kUnits;
  static constexpr int kValueRows = kRows <= 16 ? 4 : 8;
  static constexpr int kValueRowGroups = kRows / kValueRows;
  static constexpr int kValueSlices = kSets / kValueRowGroups;
  static_assert(kValueSlices >= 1, "more row groups than thread sets");

  // Weights are stored token by token; the padding keeps 16-byte alignment and spreads the banks.
  static constexpr int kWeightStride = kRows <= 4 ? kRows : kRows + 4;

  // Shared memory beyond the ring, byte offsets. `query` becomes the output accumulator at the end.
  static constexpr int kQueryAt = 0;                                  // [rows][H]
  static constexpr int kPartialAt = kQueryAt + 4 * kRows * kHeadDim;  // [slices][rows][tokens]
  static constexpr int kWeightAt = kPartialAt + 4 * kScoreSlices * kRows * kTokens;
  static constexpr int kRescaleAt = kWeightAt + 4 * kTokens * kWeightStride;  // [rows]
  static constexpr int kStateAt = kRescaleAt + 4 * kRows;                     // [rows] of m, l
  static constexpr int kTokenAt = kStateAt + 8 * kRows;  // [rows] new token t of the row

 public:
  static constexpr int kSharedBytes = kTokenAt + 4 * kRows;

  __device__ __forceinline__ FmaAttention(const AttendParams& p, unsigned char* shared)
      : query_(reinterpret_cast<float*>(shared + kQueryAt)),
        partial_(reinterpret_cast<float*>(shared + kPartialAt)),
        weight_(reinterpret_cast<float*>(shared + kWeightAt)),
        rescale_(reinterpret_cast<float*>(shared + kRescaleAt)),
        state_(reinterpret_cast<SoftmaxState*>(shared + kStateAt)),
        token_(reinterpret_cast<int*>(shared + kTokenAt)),
        options_(p) {}

  // Loads the queries of a segment; the sums are empty. Rows that the block does not have are zeros
  // of weight kHidden.
  __device__ __forceinline__ void begin(const AttendParams& p, const QueryRows& rows) {
    rows_ = rows.count;
    const auto* query = static_cast<const unsigned char*>(p.query);
    constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kQuads; i += kThreads) {
      const int r = i / kQuads, quad = i % kQuads;
      float q[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (r < rows_)
        load_floats<kDType>(query + (rows.query(r) * kHeadDim + quad * 4) * Shape::kItem, q);
      *reinterpret_cast<float4*>(query_ + r * kHeadDim + quad * 4) =
          make_float4(q[0], q[1], q[2], q[3]);
    }
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < kTokens * kWeightStride; i += kThreads)
      weight_[i] = kHidden;
    static_assert(kRows <= kThreads, "one thread per row");
    const int r = static_cast<int>(threadIdx.x);
    if (r < kRows) {
      rescale_[r] = 1.0f;
      state_[r] = empty_state();
      token_[r] = rows.token(min(r, rows_ - 1));
    }
#pragma unroll
    for (int r = 0; r < kValueRows; ++r)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum_[r][e] = 0.0f;
    sync();
  }

  // Adds a tile.
  __device__ __forceinline__ void add(const unsigned char* stage, const Tile& tile) {
    scores(tile.count, stage);
    sync();
    softmax(tile);
    sync();
    values(tile.count, stage + Shape::kHalfBytes);
  }

  // Writes the results of the segment; the last stage is not used. The queries' memory becomes the
  // accumulator of the slices.
  __device__ __forceinline__ void finish(const Output& output, unsigned char*) {
    sync();  // everyone is done with the queries

    // One slice after the other, so that the order of the sum is fixed.
#pragma unroll 1
    for (int slice = 0; slice < kValueSlices; ++slice) {
      if (value_slice() == slice && value_row() < rows_) {
#pragma unroll
        for (int r = 0; r < kValueRows; ++r) {
          float* to = query_ + (value_row() + r) * kHeadDim + value_column();
#pragma unroll
          for (int e = 0; e < 4; ++e) to[e] = slice == 0 ? sum_[r][e] : to[e] + sum_[r][e];
        }
      }
      sync();
    }
    constexpr int kPairs = kHeadDim / 2;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x); i < rows_ * kPairs; i += kThreads) {
      const int row = i / kPairs, column = i % kPairs * 2;
      const float* const from = query_ + row * kHeadDim + column;
      output.row(row, state_[row]).put(column, from[0], from[1]);
    }
    const int own = static_cast<int>(threadIdx.x);
    if (own < rows_) output.row(own, state_[own]).put_state(state_[own]);
    sync();  // begin() writes over all of it
  }

 private:
  static __device__ __forceinline__ void sync() { sync_some(1, kThreads); }

  // With many rows one step is long enough, and two would not fit the registers.
  static constexpr int kUnroll = kRows >= 16 ? 1 : 2;

  // Roles of this thread.
  static __device__ __forceinline__ int token() { return static_cast<int>(threadIdx.x) % kTokens; }
  static __device__ __forceinline__ int group() { return static_cast<int>(threadIdx.x) / kTokens; }
  static __device__ __forceinline__ int value_set() {
    return static_cast<int>(threadIdx.x) / kUnits;
  }
  static __device__ __forceinline__ int value_column() {
    return static_cast<int>(threadIdx.x) % kUnits * 4;
  }
  static __device__ __forceinline__ int value_row() {
    return value_set() % kValueRowGroups * kValueRows;
  }
  // May be kValueSlices or more: then the thread has no part in it.
  static __device__ __forceinline__ int value_slice() { return value_set() / kValueRowGroups; }

  // partial_[slice][row][token]: dot products over one slice of the head dim.
  __device__ __forceinline__ void scores(int count, const unsigned char* keys) {
    const int slice = group() % kScoreSlices;
    const int row = group() / kScoreSlices * kScoreRows;
    if (token() >= count || row >= rows_) return;
    constexpr int kWidth = 16 / Shape::kItem;
    float dot[kScoreRows];
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) dot[r] = 0.0f;
#pragma unroll kUnroll
    for (int piece = slice; piece < kPieces; piece += kScoreSlices) {
      float k[kWidth];
      load_floats<kDType>(keys + Shape::offset(token(), piece), k);
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) {
        const float* q = query_ + (row + r) * kHeadDim + piece * kWidth;
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
    for (int r = 0; r < kScoreRows; ++r)
      partial_[(slice * kRows + row + r) * kTokens + token()] = dot[r];
  }

  __device__ __forceinline__ void softmax(const Tile& tile) {
    const int relative = tile.relative + token();
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * (32 / kTokens);
#pragma unroll 1
    for (int i = 0; i < kSoftmaxRows; ++i) {
      // The same in the whole warp, whose lanes shuffle below.
      if (warp_row + i * kGroups >= rows_) break;
      const int row = group() + i * kGroups;
      const bool has_row = row < rows_, has_token = token() < tile.count;
      const int t = has_row ? token_[row] : 0;
      const bool seen = has_row && has_token && options_.seen(t, relative);
      float logit = -INFINITY;
      if (seen) {
        float dot = 0.0f;
#pragma unroll
        for (int slice = 0; slice < kScoreSlices; ++slice)
          dot += partial_[(slice * kRows + row) * kTokens + token()];
        logit = dot * options_.scale;
        if (options_.soft_cap > 0.0f) logit = options_.soft_cap * tanhf(logit / options_.soft_cap);
      }
      const SoftmaxState old = has_row ? state_[row] : empty_state();
      SoftmaxState now;
      now.m = max_keep_nan(old.m, group_max<kTokens>(logit));
      const float weight = seen ? rescale(logit, now.m) : 0.0f;
      const float factor = rescale(old.m, now.m);
      now.l = old.l * factor + group_sum<kTokens>(weight);
      if (has_row && has_token) weight_[token() * kWeightStride + row] = seen ? weight : kHidden;
      __syncwarp();  // the whole group has read the old state
      if (has_row && token() == 0) {
        state_[row] = now;
        rescale_[row] = factor;
      }
    }
  }

  __device__ __forceinline__ void values(int count, const unsigned char* values) {
    if (value_slice() >= kValueSlices || value_row() >= rows_) return;
#pragma unroll
    for (int r = 0; r < kValueRows; r += 4) {
      const float4 factor = *reinterpret_cast<const float4*>(rescale_ + value_row() + r);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum_[r][e] *= factor.x;
        sum_[r + 1][e] *= factor.y;
        sum_[r + 2][e] *= factor.z;
        sum_[r + 3][e] *= factor.w;
      }
    }
    static_assert(Shape::kItem == 4, "a piece is 4 elements");
    const int piece = value_column() / 4;
#pragma unroll kUnroll
    for (int t = value_slice(); t < count; t += kValueSlices) {
      float v[4];
      load_floats<kDType>(values + Shape::offset(t, piece), v);
      const float* weight = weight_ + t * kWeightStride + value_row();
#pragma unroll
      for (int r = 0; r < kValueRows; r += 4) {
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
  int* token_;           // [kRows]
  LogitOptions options_;
  int rows_;
  float sum_[kValueRows][4];
};

}  // namespace directkv::cuda

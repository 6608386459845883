// Attention of 128 query rows over tiles of 16-bit elements, by two warpgroups of 64 rows each.
//
// A warpgroup multiplies its queries with the keys of the next tile, asynchronously, while the
// weights of this one are being multiplied with its values; the softmax of the next runs meanwhile.
// Scores, weights, states and output stay in registers.
//
// At the edges (the end of the row, the left end of the window, new tokens that not all rows see)
// scores are selected, and what no weight may touch is taken out of the values in shared memory:
// rows beyond the edge, and infinite or NaN values of tokens that some rows do not see. Those are
// added to the rows that do.
#pragma once

#include "../softmax_state.h"
#include "chunk_tiles.cuh"
#include "elements.cuh"
#include "query_rows.cuh"
#include "tile_map.cuh"
#include "warpgroup.cuh"

namespace directkv::cuda {

template <DType kDType_, int kHeadDim_>
struct ChunkShape {
  static constexpr DType kDType = kDType_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kTokens = chunk_tile_tokens(kHeadDim);
  static constexpr int kSpans = kHeadDim / 64;
  static constexpr int kSpanBytes = kTokens * kSwizzledBytes;  // a span of all tokens of a tile
  static constexpr int kTileBytes = kSpans * kSpanBytes;       // keys, or values
  static constexpr int kQueryBytes = kChunkRows * kHeadDim * 2;
  static constexpr int kStages = 2;  // of keys, and of values
  static constexpr int kBarriers = 4 * kStages;
  static constexpr int kSharedBytes = kQueryBytes + 2 * kStages * kTileBytes + 8 * kBarriers;

  // Byte offset of a 16-byte piece of a row, where a span has `rows` rows.
  static __device__ __forceinline__ int offset(int rows, int row, int piece) {
    return piece / 8 * rows * kSwizzledBytes + row * kSwizzledBytes + (piece % 8 ^ row % 8) * 16;
  }
};

template <DType kDType, int kHeadDim>
class ChunkAttention {
 public:
  using Shape = ChunkShape<kDType, kHeadDim>;
  using E = typename Element<kDType>::type;

  __device__ __forceinline__ ChunkAttention(const AttendParams& p, const QueryRows& rows,
                                            unsigned char* queries)
      : options_(p), rows_(rows), queries_(queries) {
    const int last = rows.count - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) token_[i] = rows.token(min(row(i), last));
    first_token_ = rows.token(0);
    last_token_ = rows.token(last);
    max_[0] = max_[1] = -INFINITY;
    sum_[0] = sum_[1] = 0.0f;
#pragma unroll
    for (float& x : out_) x = 0.0f;
  }

  // Brings this warpgroup's queries to shared memory; rows that the block does not have are zeros.
  __device__ __forceinline__ void load_queries(const AttendParams& p) {
    constexpr int kPieces = kHeadDim / 8;
    const auto* const query = static_cast<const uint4*>(p.query);
#pragma unroll 8
    for (int i = thread(); i < 64 * kPieces; i += kWarpgroup) {
      const int r = group() * 64 + i / kPieces, piece = i % kPieces;
      const uint4 zero = {0, 0, 0, 0};
      *reinterpret_cast<uint4*>(queries_ + Shape::offset(kChunkRows, r, piece)) =
          r < rows_.count ? query[rows_.query(r) * kPieces + piece] : zero;
    }
    fence_before_bulk_copies();
    sync_some(1 + group(), kWarpgroup);
  }

  // States of an earlier launch, and for a later one: every thread its own, side by side.
  __device__ __forceinline__ void load_state(const float* from) {
    from += threadIdx.x;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out_[i] = from[i * 2 * kWarpgroup];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max_[i] = from[(kHeadDim / 2 + i) * 2 * kWarpgroup];
      sum_[i] = from[(kHeadDim / 2 + 2 + i) * 2 * kWarpgroup];
    }
  }
  __device__ __forceinline__ void store_state(float* to) const {
    to += threadIdx.x;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) to[i * 2 * kWarpgroup] = out_[i];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[(kHeadDim / 2 + i) * 2 * kWarpgroup] = max_[i];
      to[(kHeadDim / 2 + 2 + i) * 2 * kWarpgroup] = sum_[i];
    }
  }
  static constexpr int kStateFloats = chunk_state_floats(kHeadDim);  // of a CTA

  // Attends to tiles [0, count) that `keys` and `values` bring, in order.
  template <typename Ring, typename Tiles>
  __device__ __forceinline__ void add(const Tiles& tiles, Ring keys, Ring values) {
    const int count = tiles.count();
    if (count == 0) return;
    float factor[2];
    multiply_keys(keys.take());
    warpgroup_wait<0>();
    keep(score_);
    keys.release();
    softmax(tiles.tile(0), factor);
    rescale_output(factor);
    make_weights();
#pragma unroll 1
    for (int i = 0; i + 1 < count; ++i) {
      clean_edge(tiles.tile(i), values);
      multiply_keys(keys.take());
      multiply_values(values.take());
      warpgroup_wait<1>();
      keep(score_);
      keys.release();
      softmax(tiles.tile(i + 1), factor);
      values.take();  // is there; without a branch here ptxas waits before the softmax
      warpgroup_wait<0>();
      keep(out_);
      keep(weight_);
      values.release();
      rescale_output(factor);
      make_weights();
    }
    clean_edge(tiles.tile(count - 1), values);
    multiply_values(values.take());
    warpgroup_wait<0>();
    keep(out_);
    keep(weight_);
    values.release();
  }

  // Writes out and lse of the rows of the block.
  __device__ __forceinline__ void finish(const AttendParams& p) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row(i) >= rows_.count) continue;
      float sum = sum_[i];
      const SoftmaxState state = {max_[i] * kLn2, sum};
      const int64_t query = rows_.query(row(i));
      const float inverse = inverse_sum(state);
      uint32_t* const to =
          reinterpret_cast<uint32_t*>(static_cast<E*>(p.out) + query * kHeadDim) + lane_id() % 4;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n)
        to[4 * n] = pack<kDType>(out_[4 * n + 2 * i] * inverse, out_[4 * n + 2 * i + 1] * inverse);
      if (lane_id() % 4 == 0) p.lse[query] = logsumexp(state);
    }
  }

 private:
  static constexpr int kScores = Shape::kTokens / 2;  // of a thread
  static_assert(kChunkRows == 2 * 64, "two warpgroups");

  static __device__ __forceinline__ int group() {
    return static_cast<int>(threadIdx.x) / kWarpgroup;
  }
  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.x) % kWarpgroup;
  }
  // This thread's rows: i is 0 or 1.
  static __device__ __forceinline__ int row(int i) {
    return static_cast<int>(threadIdx.x) / 32 * 16 + lane_id() / 4 + 8 * i;
  }

  __device__ __forceinline__ void multiply_keys(const unsigned char* keys) {
    keep(score_);
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k) {
      const int in_span = k % 4 * 32;
      const unsigned char* const query =
          queries_ + k / 4 * kChunkRows * kSwizzledBytes + group() * 64 * kSwizzledBytes + in_span;
      multiply_rows<kDType, Shape::kTokens>(score_, rows_matrix(query),
                                            rows_matrix(keys + k / 4 * Shape::kSpanBytes + in_span),
                                            k > 0);
    }
    warpgroup_commit();
  }

  __device__ __forceinline__ void multiply_values(const unsigned char* values) {
    keep(out_);
    keep(weight_);
    warpgroup_begin();
#pragma unroll
    for (int k = 0; k < Shape::kTokens / 16; ++k) {
      const uint32_t a[4] = {weight_[4 * k], weight_[4 * k + 1], weight_[4 * k + 2],
                             weight_[4 * k + 3]};
      multiply_columns<kDType, kHeadDim>(
          out_, a, columns_matrix(values + k * 16 * kSwizzledBytes, Shape::kSpanBytes));
    }
    warpgroup_commit();
  }

  // What the query with new token t sees of a tile: tokens [begin, end).
  struct TokenRange {
    int begin, end;
    __device__ __forceinline__ bool has(int token) const { return token >= begin && token < end; }
  };
  __device__ __forceinline__ TokenRange seen_by(int t, const ChunkTile& tile) const {
    return {options_.first_seen(t) - tile.relative, min(tile.count, t - tile.relative + 1)};
  }
  // Is there a token of the tile that not all rows of the CTA see?
  __device__ __forceinline__ bool at_edge(const ChunkTile& tile) const {
    return seen_by(first_token_, tile).end < Shape::kTokens || seen_by(last_token_, tile).begin > 0;
  }

  // From scores to weights and a new maximum; `factor` is what older sums are multiplied by.
  __device__ __forceinline__ void softmax(const ChunkTile& tile, float (&factor)[2]) {
    if (options_.soft_cap > 0.0f) {
      const float inner = 2.0f * kLog2E * options_.scale / options_.soft_cap;
      const float cap = options_.soft_cap * kLog2E;
#pragma unroll
      for (float& x : score_) x = cap - 2.0f * cap * reciprocal_fast(exp2_fast(x * inner) + 1.0f);
    } else {
#pragma unroll
      for (float& x : score_) x *= options_.scale * kLog2E;
    }
    if (at_edge(tile)) {
      const TokenRange seen[2] = {seen_by(token_[0], tile), seen_by(token_[1], tile)};
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        if (!seen[i % 4 / 2].has(i / 4 * 8 + lane_id() % 4 * 2 + i % 2)) score_[i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = -INFINITY;
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) m = max_nan(m, max_nan(score_[i], score_[i + 1]));
      m = max_nan(m, __shfl_xor_sync(kFullWarp, m, 1));
      m = max_nan(m, __shfl_xor_sync(kFullWarp, m, 2));
      m = max_nan(m, max_[r]);
      const float from = m == -INFINITY ? 0.0f : m;  // no token seen yet: all weights are 0
      factor[r] = exp2_fast(max_[r] - from);
      max_[r] = m;
      float sum = 0.0f;
#pragma unroll
      for (int i = 2 * r; i < kScores; i += 4) {
        score_[i] = exp2_fast(score_[i] - from);
        score_[i + 1] = exp2_fast(score_[i + 1] - from);
        sum += score_[i] + score_[i + 1];
      }
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      sum_[r] = sum_[r] * factor[r] + sum;
    }
  }

  __device__ __forceinline__ void rescale_output(const float (&factor)[2]) {
    if (!__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) out_[i] *= factor[i % 4 / 2];
  }

  // Scores have the places of a result, weights those of an operand: register 2 j holds row 0 of
  // group j, 2 j + 1 row 1.
  __device__ __forceinline__ void make_weights() {
#pragma unroll
    for (int i = 0; i < kScores / 2; ++i)
      weight_[i] = pack<kDType>(score_[2 * i], score_[2 * i + 1]);
  }

  template <typename Ring>
  __device__ __forceinline__ void clean_edge(const ChunkTile& tile, const Ring& values) {
    if (at_edge(tile)) clean_values(values.take(), tile);
  }

  // Both warpgroups, over a tile that not all of their rows see in full.
  __device__ __forceinline__ void clean_values(unsigned char* values, const ChunkTile& tile) {
    const TokenRange some = {max(0, seen_by(first_token_, tile).begin),
                             seen_by(last_token_, tile).end};
    constexpr int kPieces = kHeadDim / 8;
    bool nonfinite = false;
    for (int i = lane_id(); i < Shape::kTokens * kPieces; i += 32) {
      const int token = i / kPieces;
      if (!some.has(token)) continue;
      const auto v = *reinterpret_cast<const uint4*>(
          values + Shape::offset(Shape::kTokens, token, i % kPieces));
      nonfinite |= any_nonfinite<kDType>(v.x) || any_nonfinite<kDType>(v.y) ||
                   any_nonfinite<kDType>(v.z) || any_nonfinite<kDType>(v.w);
    }
    nonfinite = __any_sync(kFullWarp, nonfinite);
    if (nonfinite) add_nonfinite(values, tile, some);
    sync_some(3, 2 * kWarpgroup);  // all have looked
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kTokens * kPieces; i += 2 * kWarpgroup) {
      auto* const v = reinterpret_cast<uint4*>(
          values + Shape::offset(Shape::kTokens, i / kPieces, i % kPieces));
      if (!some.has(i / kPieces)) {
        *v = {0, 0, 0, 0};
      } else if (nonfinite) {
        *v = {finite(v->x), finite(v->y), finite(v->z), finite(v->w)};
      }
    }
    fence_before_bulk_copies();
    sync_some(3, 2 * kWarpgroup);
  }

  // The elements that are finite; 0 in place of others.
  static __device__ __forceinline__ uint32_t finite(uint32_t pair) {
    return (any_nonfinite<kDType>(pair & 0xffffu) ? 0u : pair & 0xffffu) |
           (any_nonfinite<kDType>(pair & 0xffff0000u) ? 0u : pair & 0xffff0000u);
  }

  // Infinite and NaN values, added to the rows that see their tokens.
  __device__ __forceinline__ void add_nonfinite(const unsigned char* values, const ChunkTile& tile,
                                                const TokenRange& some) {
    const TokenRange seen[2] = {seen_by(token_[0], tile), seen_by(token_[1], tile)};
#pragma unroll 1
    for (int token = some.begin; token < some.end; ++token) {
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
        uint32_t pair;
        std::memcpy(&pair, values + Shape::offset(Shape::kTokens, token, n) + lane_id() % 4 * 4, 4);
        if (!any_nonfinite<kDType>(pair)) continue;
        E value[2];
        std::memcpy(value, &pair, 4);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float v = Element<kDType>::to_float(value[e % 2]);
          if (seen[e / 2].has(token) && !(v - v == 0.0f)) out_[4 * n + e] += v;
        }
      }
    }
  }

  LogitOptions options_;
  QueryRows rows_;
  unsigned char* queries_;
  int token_[2];                  // of this thread's rows
  int first_token_, last_token_;  // of the CTA's
  float max_[2], sum_[2];         // in units of log(2); sums of the weights
  float score_[kScores], out_[kHeadDim / 2];
  uint32_t weight_[kScores / 2];
};

}  // namespace directkv::cuda

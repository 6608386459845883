// Attention of a block of query rows over tiles of 16-bit elements, on the tensor cores.
//
// Every warp keeps the queries, the softmax states and the output of 16 rows in registers (the
// queries in shared memory where registers do not suffice for both). The warps of a CTA stand in a
// grid: kRowWarps of them side by side cover the rows of the class, and kTokenWarps of them share
// the tokens, each taking every kTokenWarps-th slice of 16 or 32 tokens. So no warp waits for
// another before the end of a segment, where the states of the token warps merge.
//
// At the edges (the end of the row, the left end of the window, fresh tokens) masks select and
// never multiply: a hidden logit is -inf, a value that no row may see is 0, and where a value that
// some rows see and others do not is infinite or NaN, the slice is added row by row on the FMA
// units.
#pragma once

#include "../softmax_state.h"
#include "matrix.cuh"
#include "segment_output.cuh"
#include "tile_ring.cuh"

namespace directkv::cuda {

// kRowWarps * 16: the query rows a CTA has room for.
template <DType kDType, int kHeadDim, int kRowWarps_>
class MatrixAttention {
 public:
  using Shape = TileShape<kDType, kHeadDim>;
  using Output = SegmentOutput<kDType, kHeadDim>;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kWarps = kRowWarps > 4 ? kRowWarps : 4;
  static constexpr int kTokenWarps = kWarps / kRowWarps;
  // Registers: the output takes H / 2 of them in each thread, the queries H / 4.
  static constexpr int kCtasPerSm = kHeadDim > 128 || kWarps > 4 ? 1 : 2;
  static constexpr bool kQueriesInShared = kHeadDim > 128 && kWarps > 4;
  // Beyond the ring: the queries, or maximum and sum of the rows where states merge.
  static constexpr int kSharedBytes =
      kQueriesInShared ? kWarps * 16 * kHeadDim * 2 : kTokenWarps / 2 * kRowWarps * 512;
  static_assert(!kQueriesInShared || kTokenWarps == 1, "one or the other");

  __device__ __forceinline__ MatrixAttention(const AttendParams& p, unsigned char* shared)
      : options_(p), shared_(shared) {}

  // Loads the queries of a segment; the sums are empty.
  __device__ __forceinline__ void begin(const AttendParams& p, const QueryRows& rows) {
    rows_ = rows.count;
    // Rows the block does not have are zeros, and stand where its last row stands, so that they
    // hide nothing.
    const int last = rows.count - 1;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      token_[i] = rows.token(min(first_row() + lane_id() / 4 + 8 * i, last));
    const auto row_of_query = [&](int row) {
      return static_cast<const unsigned char*>(p.query) +
             rows.query(min(row, last)) * (kHeadDim * 2);
    };
    if constexpr (kQueriesInShared) {
      __syncwarp();  // the last segment's have been read
      constexpr int kPieces = kHeadDim / 8;
#pragma unroll 4
      for (int i = lane_id(); i < 16 * kPieces; i += 32) {
        const int row = i / kPieces, piece = i % kPieces;
        const uint4* const from = reinterpret_cast<const uint4*>(row_of_query(first_row() + row));
        *reinterpret_cast<uint4*>(queries() + query_offset(row, piece)) =
            first_row() + row <= last ? from[piece] : uint4{0, 0, 0, 0};
      }
      __syncwarp();
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row() + lane_id() / 4 + 8 * i;
        const auto* pairs = reinterpret_cast<const uint32_t*>(row_of_query(row));
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            query_[s][i + 2 * half] = row <= last ? pairs[8 * s + 4 * half + lane_id() % 4] : 0;
      }
    }
    first_token_ = rows.token(min(first_row(), last));
    last_token_ = rows.token(min(first_row() + 15, last));
#pragma unroll
    for (int i = 0; i < 2; ++i) max_[i] = -INFINITY, sum_[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out_[n][e] = 0.0f;
    slices_ = 0;
  }

  // Adds a tile.
  __device__ __forceinline__ void add(const unsigned char* stage, const Tile& tile) {
    if (first_row() < rows_) {
#pragma unroll 1
      for (int first = (token_warp() + kTokenWarps - slices_ % kTokenWarps) % kTokenWarps * kSlice;
           first < tile.count; first += kTokenWarps * kSlice) {
        add_slice(stage, first, tile.relative + first, tile.count - first);
      }
    }
    // The next tile begins with the next warp.
    slices_ += (tile.count + kSlice - 1) / kSlice;
  }

  // Writes the results of the segment. `scratch`: the stage of its last tile.
  __device__ __forceinline__ void finish(const Output& output, unsigned char* scratch) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum_[i] += __shfl_xor_sync(kFullWarp, sum_[i], 1);
      sum_[i] += __shfl_xor_sync(kFullWarp, sum_[i], 2);
    }
    // Half of the token warps hand their states to the other half, until one has all; those that
    // had no slice have none to give. A warp that gives after it has received uses the place it
    // received from.
    if (kTokenWarps > 1 && slices_ > 1) {
      // The last tile has been used, and the places of the last segment's states.
      sync_some(1, kWarps * 32);
#pragma unroll
      for (int half = kTokenWarps / 2; half > 0; half /= 2) {
        if (half >= slices_) continue;
        const int place =
            (token_warp() % half + (2 * half < kTokenWarps ? half : 0)) * kRowWarps + row_warp();
        float4* const out = reinterpret_cast<float4*>(scratch) + place * kColumns * 32 + lane_id();
        float4* const state = reinterpret_cast<float4*>(shared_) + place * 32 + lane_id();
        if (token_warp() >= half && token_warp() < 2 * half) give(out, state);
        sync_some(1, kWarps * 32);
        if (token_warp() < half) merge(out, *state);
      }
    }
    if (token_warp() != 0) return;
    const int column = lane_id() % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row() + lane_id() / 4 + 8 * i;
      if (row >= rows_) continue;
      const SoftmaxState state = {max_[i] * kLn2, sum_[i]};
      const auto to = output.row(row, state);
#pragma unroll
      for (int n = 0; n < kColumns; ++n) to.put(8 * n + column, out_[n][2 * i], out_[n][2 * i + 1]);
      if (column == 0) to.put_state(state);
    }
  }

 private:
  // Tokens at a time: twice the 16 of a matrix instruction where a warp has them in every tile.
  static constexpr int kSlice = Shape::kTokens / kTokenWarps >= 32 ? 32 : 16;
  static constexpr int kGroups = kSlice / 8;     // groups of 8 tokens: columns of the logits
  static constexpr int kSteps = kHeadDim / 16;   // matrix instructions along the head dim
  static constexpr int kColumns = kHeadDim / 8;  // 8 columns each of the output
  static_assert(kHeadDim % 16 == 0 && Shape::kTokens % kSlice == 0 && kGroups % 2 == 0, "shape");
  static_assert(kTokenWarps / 2 * kRowWarps * kColumns * 512 <= Shape::kStageBytes, "scratch");

  static __device__ __forceinline__ int warp() { return static_cast<int>(threadIdx.x) / 32; }
  static __device__ __forceinline__ int row_warp() { return warp() % kRowWarps; }
  static __device__ __forceinline__ int token_warp() { return warp() / kRowWarps; }
  static __device__ __forceinline__ int first_row() { return row_warp() * 16; }

  // The queries of this warp in shared memory, pieces of 16 bytes swizzled by the row.
  __device__ __forceinline__ unsigned char* queries() const {
    return shared_ + warp() * 16 * kHeadDim * 2;
  }
  static __device__ __forceinline__ int query_offset(int row, int piece) {
    return row * (kHeadDim * 2) + (piece ^ row % 8) * 16;
  }

  // load(register, i), then use(register, i), for i in [0, kCount), the loads two ahead of the
  // uses.
  template <int kCount, typename Load, typename Use>
  static __device__ __forceinline__ void pipelined(Load load, Use use) {
    constexpr int kAhead = 3;
    uint32_t r[kAhead][4];
#pragma unroll
    for (int i = 0; i < kAhead - 1 && i < kCount; ++i) load(r[i], i);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i + kAhead - 1 < kCount) load(r[(i + kAhead - 1) % kAhead], i + kAhead - 1);
      use(r[i % kAhead], i);
    }
  }

  // Tokens [first, first + kSlice) of a tile, of which `count` (at least 1) are there.
  __device__ __forceinline__ void add_slice(const unsigned char* stage, int first, int relative,
                                            int count) {
    float weight[kGroups][4];
    logits(stage, first, weight);
    const TokenRange all = {0, kSlice};
    const TokenRange seen[2] = {seen_by(token_[0], relative, count),
                                seen_by(token_[1], relative, count)};
    // By some row of the warp, and by all: its rows stand in the order of their tokens.
    const TokenRange some = {seen_by(first_token_, relative, count).begin,
                             seen_by(last_token_, relative, count).end};
    const bool edge = seen_by(first_token_, relative, count).end < kSlice ||
                      seen_by(last_token_, relative, count).begin > 0;
    if (edge) {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (!seen[e / 2].has(8 * n + lane_id() % 4 * 2 + e % 2)) weight[n][e] = -INFINITY;
    }
    softmax(weight);
    const unsigned char* const values = stage + Shape::kHalfBytes;
    // Where all rows see the same tokens, the others are masked in full.
    if (edge && first_token_ != last_token_ && any_nonfinite_value(values, first, some)) {
      add_values_singly(values, first, seen, min(count, kSlice), weight);
    } else {
      add_values(values, first, edge ? some : all, weight);
    }
  }

  // Tokens of a slice, from `begin` to before `end`; either may lie outside of the slice.
  struct TokenRange {
    int begin, end;
    __device__ __forceinline__ bool has(int token) const { return token >= begin && token < end; }
  };

  // What the query with new token t sees of the `count` tokens from `relative` on.
  __device__ __forceinline__ TokenRange seen_by(int t, int relative, int count) const {
    return {options_.first_seen(t) - relative, min(count, t - relative + 1)};
  }

  // Logits in units of log(2).
  __device__ __forceinline__ void logits(const unsigned char* keys, int first,
                                         float (&logit)[kGroups][4]) const {
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) logit[n][e] = 0.0f;
    const int token = lane_id() / 16 * 8 + lane_id() % 8;
    const int flip = Shape::flip(token, lane_id() / 8 % 2);
    constexpr int kPairs = kGroups / 2;
    uint32_t q[4];
    pipelined<kSteps * kPairs>(
        [&](uint32_t (&k)[4], int i) {
          load_matrices<false>(
              k, keys + Shape::piece_pair(first + token + i % kPairs * 16, flip, i / kPairs));
        },
        [&](const uint32_t (&k)[4], int i) {
          const int n = i % kPairs * 2, step = i / kPairs;
          if constexpr (kQueriesInShared) {
            if (n == 0)
              load_matrices<false>(
                  q, queries() + query_offset(lane_id() % 16, 2 * step + lane_id() / 16));
            multiply_add<kDType>(logit[n], q, k[0], k[1]);
            multiply_add<kDType>(logit[n + 1], q, k[2], k[3]);
          } else {
            multiply_add<kDType>(logit[n], query_[step], k[0], k[1]);
            multiply_add<kDType>(logit[n + 1], query_[step], k[2], k[3]);
          }
        });
    if (options_.soft_cap > 0.0f) {
      // tanh(x) = 1 - 2 / (exp(2 x) + 1): off by about 2^-23 of the cap.
      const float inner = 2.0f * kLog2E * options_.scale / options_.soft_cap;
      const float cap = options_.soft_cap * kLog2E;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          logit[n][e] = cap - 2.0f * cap * reciprocal_fast(exp2_fast(logit[n][e] * inner) + 1.0f);
    } else {
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) logit[n][e] *= options_.scale * kLog2E;
    }
  }

  // From logits to weights; carries maximum, sum and output over to the new maximum.
  __device__ __forceinline__ void softmax(float (&x)[kGroups][4]) {
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = max_nan(x[0][2 * i], x[0][2 * i + 1]);
#pragma unroll
      for (int n = 1; n < kGroups; ++n) m = max_nan(m, max_nan(x[n][2 * i], x[n][2 * i + 1]));
      m = max_nan(m, __shfl_xor_sync(kFullWarp, m, 1));
      m = max_nan(m, __shfl_xor_sync(kFullWarp, m, 2));
      m = max_nan(m, max_[i]);
      const float from = m == -INFINITY ? 0.0f : m;  // no token seen yet: all weights are 0
      factor[i] = exp2_fast(max_[i] - from);
      max_[i] = m;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int e = 2 * i; e < 2 * i + 2; ++e) {
          x[n][e] = exp2_fast(x[n][e] - from);
          sum += x[n][e];
        }
      sum_[i] = sum_[i] * factor[i] + sum;
    }
    // Seldom, once the rows have seen some tokens.
    if (__any_sync(kFullWarp, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) out_[n][e] *= factor[e / 2];
    }
  }

  // Mask of the elements of a register of values whose tokens are in the range: the register holds
  // tokens 2 * (lane % 4) and the next of group `n`.
  static __device__ __forceinline__ uint32_t value_mask(TokenRange range, int n) {
    const int token = 8 * n + lane_id() % 4 * 2;
    return (range.has(token) ? 0xffffu : 0u) | (range.has(token + 1) ? 0xffff0000u : 0u);
  }

  // The values of 16 tokens and 16 columns from column 16 * d.
  static __device__ __forceinline__ void load_values(uint32_t (&v)[4], const unsigned char* values,
                                                     int first, int d) {
    const int token = lane_id() % 16;
    load_matrices<true>(
        v, values + Shape::piece_pair(first + token, Shape::flip(token, lane_id() / 16), d));
  }

  __device__ __forceinline__ void add_values(const unsigned char* values, int first,
                                             TokenRange range, const float (&weight)[kGroups][4]) {
#pragma unroll
    for (int n = 0; n < kGroups; n += 2) {
      const uint32_t weights[4] = {pack<kDType>(weight[n][0], weight[n][1]),
                                   pack<kDType>(weight[n][2], weight[n][3]),
                                   pack<kDType>(weight[n + 1][0], weight[n + 1][1]),
                                   pack<kDType>(weight[n + 1][2], weight[n + 1][3])};
      const uint32_t mask[2] = {value_mask(range, n), value_mask(range, n + 1)};
      pipelined<kSteps>(
          [&](uint32_t (&v)[4], int d) { load_values(v, values, first + 8 * n, d); },
          [&](const uint32_t (&v)[4], int d) {
            multiply_add<kDType>(out_[2 * d], weights, v[0] & mask[0], v[1] & mask[1]);
            multiply_add<kDType>(out_[2 * d + 1], weights, v[2] & mask[0], v[3] & mask[1]);
          });
    }
  }

  // Whether a value of the range is infinite or NaN; the same answer in all lanes.
  static __device__ __forceinline__ bool any_nonfinite_value(const unsigned char* values, int first,
                                                             TokenRange range) {
    bool found = false;
#pragma unroll 1
    for (int n = 0; n < kGroups && 8 * n < range.end; n += 2) {
#pragma unroll 1
      for (int d = 0; d < kSteps; ++d) {
        uint32_t v[4];
        load_values(v, values, first + 8 * n, d);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          found |= any_nonfinite<kDType>(v[i] & value_mask(range, n + i % 2));
      }
    }
    return __any_sync(kFullWarp, found);
  }

  // Adds only what a row sees, so that a NaN reaches no other row.
  __device__ __forceinline__ void add_values_singly(const unsigned char* values, int first,
                                                    const TokenRange (&seen)[2], int count,
                                                    const float (&weight)[kGroups][4]) {
#pragma unroll 1
    for (int token = 0; token < count; ++token) {
      const int source = lane_id() / 4 * 4 + token % 8 / 2;
      float w[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // By masks: an index known only at run time would move the weights to local memory.
        uint32_t own = 0;
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            own |= __float_as_uint(weight[n][2 * i + e]) &
                   (token / 8 == n && token % 2 == e ? 0xffffffffu : 0u);
        w[i] = __uint_as_float(__shfl_sync(kFullWarp, own, source));
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float v[2];
        load_floats<kDType>(values + Shape::offset(first + token, n) + lane_id() % 4 * 4, v);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (seen[e / 2].has(token)) out_[n][e] = fmaf(w[e / 2], v[e % 2], out_[n][e]);
      }
    }
  }

  __device__ __forceinline__ void give(float4* out, float4* state) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n)
      out[32 * n] = make_float4(out_[n][0], out_[n][1], out_[n][2], out_[n][3]);
    *state = make_float4(max_[0], max_[1], sum_[0], sum_[1]);
  }

  __device__ __forceinline__ void merge(const float4* out, float4 state) {
    const float other_max[2] = {state.x, state.y}, other_sum[2] = {state.z, state.w};
    float own[2], other[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = max_nan(max_[i], other_max[i]), to = m == -INFINITY ? 0.0f : m;
      own[i] = exp2_fast(max_[i] - to);
      other[i] = exp2_fast(other_max[i] - to);
      max_[i] = m;
      sum_[i] = sum_[i] * own[i] + other_sum[i] * other[i];
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const float4 o = out[32 * n];
      out_[n][0] = out_[n][0] * own[0] + o.x * other[0];
      out_[n][1] = out_[n][1] * own[0] + o.y * other[0];
      out_[n][2] = out_[n][2] * own[1] + o.z * other[1];
      out_[n][3] = out_[n][3] * own[1] + o.w * other[1];
    }
  }

  LogitOptions options_;
  unsigned char* shared_;
  int rows_;                      // of the block
  int token_[2];                  // new token t of this lane's two rows
  int first_token_, last_token_;  // of the warp's rows
  int slices_;                    // of the segment so far, over all token warps
  uint32_t query_[kQueriesInShared ? 1 : kSteps][4];
  float max_[2], sum_[2];  // max in units of log(2); sum of this lane's tokens
  float out_[kColumns][4];
};

}  // namespace directkv::cuda

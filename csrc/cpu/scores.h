// Scores of R query rows against a run of tokens: every key row is loaded once for all R.
#pragma once

#include "dot.h"

namespace directkv::cpu {
namespace {

// Tokens handled between two visits to the softmax state.
constexpr int kTileTokens = 64;

struct RowShape {
  int head_dim;
  int units;      // whole load units
  int tail;       // elements of the last, partial unit; 0: none
  int all_units;  // units + (tail > 0)
  int row_bytes;
};

// What to fetch while computing: the bytes a fixed distance ahead of those in use, in the order in
// which they will be used. After `end` that order goes on `jump` bytes further.
//
// Measured on one Zen 4 core with bfloat16 (plain reads: 35 GB/s): 22 GB/s fetching to L2 from 6 to
// 32 KiB ahead, 19 at a multiple of 4 KiB (same L1 sets), 14 with half that distance, 16 fetching
// to L1 (too few lines can be on their way there), 14 with its own prefetchers alone.
struct Ahead {
  static constexpr int64_t kDistance = 10 * 1024 + 256;

  const char* end;  // null: fetch nothing
  int64_t jump;
  int64_t distance;

  // The order is known to the end of the next run only, so short runs look less far ahead.
  DIRECTKV_INLINE Ahead over(const char* begin, const char* end, const char* next) {
    const int64_t run = end - begin;
    if (!next) return {nullptr, 0, 0};
    return {end, next - end, run < kDistance ? run : kDistance};
  }

  inline __attribute__((always_inline)) void fetch(const char* from, int bytes) const {
    const char* at = from + distance;
    at += at >= end ? jump : 0;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 2);
  }
};

// s[r * kTileTokens + t] = q_r . k_t for t in [0, n). Entries up to the next multiple of
// kAccumulators / R are written too, with copies: a token at or past n is never read.
template <DType kType, int R>
static void scores(const char* keys, int64_t stride, int n, const typename Dot<kType>::Pack* q,
                   const RowShape& shape, float* s, Ahead ahead) {
  using D = Dot<kType>;
  constexpr int kTokens = kAccumulators / R;  // at once
  constexpr int kUnitBytes = kUnit * Format<kType>::kBytes;
  for (int t0 = 0; t0 < n; t0 += kTokens) {
    const char* k[kTokens];
    for (int j = 0; j < kTokens; ++j) {
      const int t = t0 + j < n ? t0 + j : n - 1;
      k[j] = keys + t * stride;
      if (ahead.end) ahead.fetch(k[j], shape.row_bytes);
    }
    VF sum[kAccumulators];
#pragma GCC unroll 16
    for (int i = 0; i < kAccumulators; ++i) sum[i] = VF{};
    for (int u = 0; u < shape.units; ++u) {
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; ++j) {
        const typename D::Pack key = D::load(k[j] + u * kUnitBytes);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sum[r * kTokens + j] = D::add(sum[r * kTokens + j], key, q[r * shape.all_units + u]);
        }
      }
    }
    if (shape.tail) {
      const int u = shape.units;
#pragma GCC unroll 16
      for (int j = 0; j < kTokens; ++j) {
        const typename D::Pack key = D::load_tail(k[j] + u * kUnitBytes, shape.tail);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sum[r * kTokens + j] = D::add(sum[r * kTokens + j], key, q[r * shape.all_units + u]);
        }
      }
    }
    alignas(64) float total[kAccumulators];
#pragma GCC unroll 16
    for (int i = 0; i < kAccumulators; i += kLanes) store(total + i, reduce_lanes(sum + i));
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(s + r * kTileTokens + t0, total + r * kTokens, kTokens * sizeof(float));
    }
  }
}

}  // namespace
}  // namespace directkv::cpu

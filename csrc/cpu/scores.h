// Scores of R query rows against a run of tokens: every key row is loaded once for all R.
#pragma once

#include "dot.h"

namespace directkv::cpu {
namespace {

// Tokens handled between two visits to the softmax state.
constexpr int kTileTokens = 64;

struct RowShape {
  int head_dim;
  int units;       // whole load units
  int tail;        // elements of the last, partial unit; 0: none
  int all_units;   // units + (tail > 0)
  int row_bytes;
};

// What to fetch while computing: the bytes a fixed distance ahead of those in use, in the order in
// which they will be used. After `end` that order goes on `jump` bytes further.
//
// One core of a Zen 4 reads 33 GB/s with lines fetched to L1 in rising order 4 KiB ahead; 16 to 19
// with longer distances, with fetches to L2, or with its own prefetchers alone, which lose track
// where several rows are read side by side.
struct Ahead {
  static constexpr int64_t kDistance = 4096;

  const char* end;  // null: fetch nothing
  int64_t jump;

  inline __attribute__((always_inline)) void fetch(const char* from, int bytes) const {
    const char* at = from + kDistance;
    at += at >= end ? jump : 0;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 0, 3);
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

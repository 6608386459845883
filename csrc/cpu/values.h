// o_r += sum over tokens of p_r,t * v_t for R query rows: every value row is loaded once for all R.
#pragma once

#include "dot.h"
#include "scores.h"

namespace directkv::cpu {
namespace {

// Probabilities of a tile, [R][kTileTokens], as the value product of the type wants them.
struct Probabilities {
  alignas(64) float f32[4 * kTileTokens];
#if defined(DIRECTKV_BF16_DOT)
  alignas(64) uint16_t bf16[4 * kTileTokens + 2];  // + 2: an odd last token is read as a pair
#endif
};

// Load units of a row whose R accumulators stay in registers over all tokens.
template <int R>
constexpr int kColumns = kAccumulators / (2 * R);

// Tokens whose values go through all column blocks before the next tokens': 4 KiB of 128 bfloat16,
// so that memory is read in (almost) rising order and the second block finds its half in L1.
constexpr int kValueTokens = 16;

// kCols units of the rows of tokens [begin, end). `ahead_from` is where this step stands in the
// order of use, see add_values.
template <DType kType, int R, int kCols, bool kTail>
DIRECTKV_INLINE void value_columns(const char* values, int64_t stride, int begin, int end,
                                   const Probabilities& p, int first_row, int tail, float* o,
                                   int o_stride, Ahead ahead, const char* ahead_from) {
  using F = Format<kType>;
  constexpr int kBytes = kCols * kUnit * F::kBytes;
  VF sum[R][kCols][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < kCols; ++c) {
      sum[r][c][0] = load(o + r * o_stride + c * kUnit);
      sum[r][c][1] = load(o + r * o_stride + c * kUnit + kLanes);
    }
  }
#if defined(DIRECTKV_BF16_DOT)
  if constexpr (kPairedTokens<kType>) {
    for (int t = begin; t < end; t += 2) {
      const char* row = values + t * stride;
      const bool pair = t + 1 < end;
      if (ahead.end) ahead.fetch(ahead_from + (t - begin) * kBytes, 2 * kBytes);
      __m512bh weight[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        uint32_t two = load_as<uint32_t>(p.bf16 + (first_row + r) * kTileTokens + t);
        if (!pair) two &= 0xffffu;
        weight[r] = bits<__m512bh>(_mm512_set1_epi32(static_cast<int>(two)));
      }
#pragma GCC unroll 16
      for (int c = 0; c < kCols; ++c) {
        const char* at = row + c * kUnit * 2;
        const __m512i v0 = bits<__m512i>(kTail ? load_tail16(at, tail) : load_as<VU>(at));
        const __m512i v1 = !pair ? __m512i{}
                                 : bits<__m512i>(kTail ? load_tail16(at + stride, tail)
                                                       : load_as<VU>(at + stride));
        const __m512bh low = bits<__m512bh>(_mm512_unpacklo_epi16(v0, v1));
        const __m512bh high = bits<__m512bh>(_mm512_unpackhi_epi16(v0, v1));
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sum[r][c][0] = bits<VF>(_mm512_dpbf16_ps(bits<__m512>(sum[r][c][0]), low, weight[r]));
          sum[r][c][1] = bits<VF>(_mm512_dpbf16_ps(bits<__m512>(sum[r][c][1]), high, weight[r]));
        }
      }
    }
  } else
#endif
  {
    for (int t = begin; t < end; ++t) {
      const char* row = values + t * stride;
      if (ahead.end) ahead.fetch(ahead_from + (t - begin) * kBytes, kBytes);
#pragma GCC unroll 16
      for (int c = 0; c < kCols; ++c) {
        const char* at = row + c * kUnit * F::kBytes;
        const Pair v = kTail ? F::load_tail(at, tail) : F::load(at);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          const VF weight = splat(p.f32[(first_row + r) * kTileTokens + t]);
          sum[r][c][0] = fma(v.a, weight, sum[r][c][0]);
          sum[r][c][1] = fma(v.b, weight, sum[r][c][1]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < kCols; ++c) {
      store(o + r * o_stride + c * kUnit, sum[r][c][0]);
      store(o + r * o_stride + c * kUnit + kLanes, sum[r][c][1]);
    }
  }
}

// Tokens [begin, end) of the tile; rows first_row.. of the probabilities; o in slot order.
template <DType kType, int R>
static void add_values(const char* values, int64_t stride, int begin, int end,
                       const Probabilities& p, int first_row, const RowShape& shape, float* o,
                       Ahead ahead) {
  constexpr int kCols = kColumns<R> < 1 ? 1 : kColumns<R>;
  constexpr int kUnitBytes = kUnit * Format<kType>::kBytes;
  const int o_stride = shape.all_units * kUnit;
  for (int t = begin; t < end; t += kValueTokens) {
    const int t_end = t + kValueTokens < end ? t + kValueTokens : end;
    // The column blocks of these tokens fetch one after the other what comes a distance later.
    const char* from = values + t * stride;
    int u = 0;
    for (; u + kCols <= shape.units; u += kCols) {
      value_columns<kType, R, kCols, false>(values + u * kUnitBytes, stride, t, t_end, p, first_row,
                                            0, o + u * kUnit, o_stride, ahead, from);
      from += (t_end - t) * kCols * kUnitBytes;
    }
    for (; u < shape.units; ++u) {
      value_columns<kType, R, 1, false>(values + u * kUnitBytes, stride, t, t_end, p, first_row, 0,
                                        o + u * kUnit, o_stride, ahead, from);
      from += (t_end - t) * kUnitBytes;
    }
    if (shape.tail) {
      value_columns<kType, R, 1, true>(values + u * kUnitBytes, stride, t, t_end, p, first_row,
                                       shape.tail, o + u * kUnit, o_stride, {nullptr, 0, 0},
                                       nullptr);
    }
  }
}

}  // namespace
}  // namespace directkv::cpu

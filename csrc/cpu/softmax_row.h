// One row's step of the online softmax: raw scores of a tile to probabilities.
#pragma once

#include "dot.h"
#include "row_block.h"
#include "vec_math.h"

namespace directkv::cpu {
namespace {

struct Range {  // tokens of a tile one row sees; empty: begin == end
  int begin;
  int end;
};

DIRECTKV_INLINE float largest_lane(VF v) {
  alignas(64) float lane[kLanes];
  store(lane, v);
#pragma GCC unroll 16
  for (int width = kLanes / 2; width > 0; width /= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < width; ++i) lane[i] = lane[i] > lane[i + width] ? lane[i] : lane[i + width];
  }
  return lane[0];
}

// Turns the raw scores of one row into probabilities relative to the new maximum. Returns the
// factor by which what was summed before must shrink.
template <DType kType>
DIRECTKV_INLINE float softmax_row(const RowBlock& block, Range seen, int n, float* s,
                                  [[maybe_unused]] uint16_t* paired, float* m, VF* l) {
  const int padded = (n + kLanes - 1) / kLanes * kLanes;
  const VF scale = splat(block.scale);
  if (block.soft_cap > 0.0f) {
    const VF cap = splat(block.soft_cap), inverse = splat(1.0f / block.soft_cap);
    for (int i = 0; i < padded; i += kLanes) {
      store(s + i, cap * tanh_vec(load(s + i) * scale * inverse));
    }
  } else {
    for (int i = 0; i < padded; i += kLanes) store(s + i, load(s + i) * scale);
  }
  for (int i = 0; i < seen.begin; ++i) s[i] = -kInfinity;
  for (int i = seen.end; i < padded; ++i) s[i] = -kInfinity;

  VF top = splat(-kInfinity);
  for (int i = 0; i < padded; i += kLanes) top = max_skip_nan(load(s + i), top);
  const float tile_max = largest_lane(top);
  const float old_max = *m;
  const float new_max = tile_max > old_max ? tile_max : old_max;
  *m = new_max;

  // -inf - -inf is NaN: where nothing finite was seen, subtract 0 and exp gives 0.
  const VF shift = splat(new_max == -kInfinity ? 0.0f : new_max);
  VF sum = VF{};
  for (int i = 0; i < padded; i += kLanes) {
    VF p = exp_vec(load(s + i) - shift);
#if defined(DIRECTKV_BF16_DOT)
    if constexpr (kPairedTokens<kType>) {
      // The sum takes the rounded values too, so that the weights still add up to one.
      const __m256bh rounded = _mm512_cvtneps_pbh(bits<__m512>(p));
      __builtin_memcpy(paired + i, &rounded, sizeof(rounded));
      p = bits<VF>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits<__m256i>(rounded)), 16));
    }
#endif
    store(s + i, p);
    sum = sum + p;
  }
  if (old_max == new_max) {
    *l = *l + sum;
    return 1.0f;
  }
  const float shrink = old_max == -kInfinity ? 0.0f : __builtin_expf(old_max - new_max);
  *l = *l * shrink + sum;
  return shrink;
}

}  // namespace
}  // namespace directkv::cpu

// The running state of an online softmax, and how two of them merge.
//
// A partial result over a set of tokens is (m, l, o): m the largest logit, l the sum of
// exp(logit - m), o the sum of exp(logit - m) * v, not divided by l. An empty set is
// (-inf, 0, 0). Kernels, the merge pass and the tests all use these few functions.
#pragma once

#include <cmath>

#include "page_layout.h"

namespace directkv {

struct SoftmaxState {
  float m;
  float l;
};

DIRECTKV_HD SoftmaxState empty_state() { return {-INFINITY, 0.0f}; }

// Factor that rescales a partial sum from maximum `from` to maximum `to` (to >= from).
// -inf - -inf is NaN, so an empty side is named: it contributes nothing.
DIRECTKV_HD float rescale(float from, float to) {
  return from == -INFINITY ? 0.0f : expf(from - to);
}

// A NaN logit must survive the maximum (fmaxf drops it): it marks a row that must not look valid.
DIRECTKV_HD float max_keep_nan(float a, float b) { return (a > b || a != a) ? a : b; }

DIRECTKV_HD float logsumexp(SoftmaxState s) { return s.l == 0.0f ? -INFINITY : s.m + logf(s.l); }

// 1/l, with the empty row defined as an output of zeros.
DIRECTKV_HD float inverse_sum(SoftmaxState s) { return s.l == 0.0f ? 0.0f : 1.0f / s.l; }

}  // namespace directkv

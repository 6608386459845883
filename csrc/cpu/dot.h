// The two inner products of attention on one load unit: query . key, and probability * value.
//
// `Dot<type>::Pack` is what a unit of a query or key row is kept as. Plainly two float32 vectors;
// where the machine multiplies bfloat16 pairs into float32 (AVX512_BF16), the raw elements.
#pragma once

#include "load.h"

namespace directkv::cpu {
namespace {

template <DType kType>
struct Dot {
  using Pack = Pair;
  DIRECTKV_INLINE Pack load(const char* p) { return Format<kType>::load(p); }
  DIRECTKV_INLINE Pack load_tail(const char* p, int n) { return Format<kType>::load_tail(p, n); }
  DIRECTKV_INLINE VF add(VF sum, Pack k, Pack q) { return fma(k.b, q.b, fma(k.a, q.a, sum)); }
};

#if DIRECTKV_LANES == 16 && defined(__AVX512BF16__)
#define DIRECTKV_BF16_DOT 1

template <>
struct Dot<DType::kBF16> {
  using Pack = __m512bh;
  DIRECTKV_INLINE Pack load(const char* p) { return load_as<__m512bh>(p); }
  DIRECTKV_INLINE Pack load_tail(const char* p, int n) { return bits<__m512bh>(load_tail16(p, n)); }
  DIRECTKV_INLINE VF add(VF sum, Pack k, Pack q) {
    return bits<VF>(_mm512_dpbf16_ps(bits<__m512>(sum), k, q));
  }
};
#endif

// Does this type's value product take two tokens per instruction, with probabilities in bfloat16?
template <DType kType>
constexpr bool kPairedTokens =
#if defined(DIRECTKV_BF16_DOT)
    kType == DType::kBF16;
#else
    false;
#endif

// Slot order of a row of o: the value loads' own.
template <DType kType>
static inline int output_element_of_slot(int slot) {
  if constexpr (kPairedTokens<kType>) {
    // unpacklo/unpackhi of 16-bit words work per 128 bits: 4 low words, 4 high words of each 8.
    const int lane = slot % kLanes;
    return 8 * (lane / 4) + lane % 4 + (slot < kLanes ? 0 : 4);
  } else {
    return Format<kType>::element_of_slot(slot);
  }
}

}  // namespace
}  // namespace directkv::cpu

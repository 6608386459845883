// Tiles in shared memory: how many tokens, and where a piece of a token lies.
#pragma once

#include "../params.h"
#include "attend_plan.h"
#include "tile_map.cuh"

namespace directkv::cuda {

template <DType kDType_, int kHeadDim_>
struct TileShape {
  static constexpr DType kDType = kDType_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kItem = kDType == DType::kF32 ? 4 : 2;
  static constexpr int kTokenBytes = kHeadDim * kItem;  // of one key or value
  static constexpr int kPieces = kTokenBytes / 16;      // 16-byte pieces of it
  static constexpr int kTokens = tile_tokens(kItem, kHeadDim);
  static constexpr int kHalfBytes = kTokens * kTokenBytes;  // keys, or values
  static constexpr int kStageBytes = 2 * kHalfBytes;        // keys, then values

  // Spans, see tile_map.cuh.
  static constexpr int kSpanBytes = span_bytes(kTokenBytes);
  static constexpr int kSpans = kTokenBytes / kSpanBytes;
  static constexpr bool kSwizzled = kSpanBytes == kSwizzledBytes;
  static constexpr int kSpanPieces = kSpanBytes / 16;
  static_assert(kTokenBytes % 32 == 0 && kTokens % 8 == 0 && kStageBytes % 1024 == 0, "alignment");

  // What the swizzle does to the pieces of a span: XOR with this, the same for all pieces of a
  // token.
  static __device__ __forceinline__ int swizzle(int token) { return kSwizzled ? token % 8 : 0; }

  // Byte offset of a 16-byte piece of a token, within the keys or the values of a stage.
  static __device__ __forceinline__ int offset(int token, int piece) {
    return piece / kSpanPieces * (kTokens * kSpanBytes) + token * kSpanBytes +
           (piece % kSpanPieces ^ swizzle(token)) * 16;
  }

  // The same for loops over the pieces of a token: offset(token, 2 * i + odd) ==
  // piece_pair(token, flip(token, odd), i), and flip() repeats every 16 tokens.
  static __device__ __forceinline__ int flip(int token, int odd) {
    return (swizzle(token) ^ odd) * 16;
  }
  static __device__ __forceinline__ int piece_pair(int token, int flip, int i) {
    static_assert(kSpanPieces % 2 == 0, "pairs of pieces");
    return 2 * i / kSpanPieces * (kTokens * kSpanBytes) + token * kSpanBytes +
           ((2 * i % kSpanPieces * 16) ^ flip);
  }
};

}  // namespace directkv::cuda

// The constants of one attend kernel instance and its map of shared memory.
#pragma once

#include "../params.h"
#include "device.cuh"

namespace directkv::cuda {

constexpr int kAttendThreads = 256;

// kRows: query rows a CTA has room for.
template <DType kDType_, int kHeadDim_, int kRows_>
struct TileShape {
  static constexpr DType kDType = kDType_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRows = kRows_;
  static constexpr int kItem = kDType == DType::kF32 ? 4 : 2;
  static constexpr int kTokenBytes = kHeadDim * kItem;  // of one key or value
  static constexpr int kPieces = kTokenBytes / 16;      // 16-byte pieces of it

  // Tokens per tile: keys and values of a tile are contiguous runs of 4 to 8 KiB each. Below 2 KiB
  // the link loses bandwidth.
  static constexpr int kTokens = kTokenBytes <= 256 ? 32 : kTokenBytes <= 512 ? 16 : 8;
  // Tiles in flight while one is computed with: two, or one where many rows make the arithmetic
  // long and their queries take the room.
  static constexpr int kStages = kRows <= 16 ? 3 : 2;

  // One 16-byte piece of padding per token: kPieces is even, so 8 lanes that read the same piece of
  // 8 tokens hit 8 different groups of 4 banks.
  static constexpr int kTokenStride = kTokenBytes + 16;
  static constexpr int kStageBytes = 2 * kTokens * kTokenStride;  // keys, then values

  // Scores: kGroups groups of kTokens threads, one thread per token. A group takes kScoreRows query
  // rows and every kScoreSlices-th piece of the head dim.
  static constexpr int kGroups = kAttendThreads / kTokens;
  static constexpr int kScoreRows = kRows < 8 ? kRows : 8;
  static constexpr int kScoreSlices = kGroups / (kRows / kScoreRows);
  static_assert(kScoreSlices >= 1, "more row groups than thread groups");
  static constexpr int kSoftmaxRows = (kRows + kGroups - 1) / kGroups;  // rows a group reduces

  // Values: sets of kUnits threads, one thread per 4 elements of the head dim. A set takes
  // kValueRows query rows and every kValueSlices-th token.
  static constexpr int kUnits = kHeadDim / 4;
  static constexpr int kSets = kAttendThreads / kUnits;
  static constexpr int kValueRows = kRows <= 16 ? 4 : 8;
  static constexpr int kValueRowGroups = kRows / kValueRows;
  static constexpr int kValueSlices = kSets / kValueRowGroups;
  static_assert(kValueSlices >= 1, "more row groups than thread sets");

  // Weights are stored token by token; the padding keeps 16-byte alignment and spreads the banks.
  static constexpr int kWeightStride = kRows <= 4 ? kRows : kRows + 4;

  // Shared memory, byte offsets. `query` becomes the output accumulator at the end.
  static constexpr int kQueryAt = 0;                                    // [rows][H]
  static constexpr int kStagesAt = kQueryAt + 4 * kRows * kHeadDim;     // [stages]
  static constexpr int kPartialAt = kStagesAt + kStages * kStageBytes;  // [slices][rows][tokens]
  static constexpr int kWeightAt = kPartialAt + 4 * kScoreSlices * kRows * kTokens;
  static constexpr int kRescaleAt = kWeightAt + 4 * kTokens * kWeightStride;  // [rows]
  static constexpr int kStateAt = kRescaleAt + 4 * kRows;                     // [rows] of m, l
  static constexpr int kSlotAt = kStateAt + 8 * kRows;  // [rows] int64: slot in the workspace
  static constexpr int kTokenAt = kSlotAt + 8 * kRows;  // [rows] new token t of the row
  static constexpr int kSharedBytes = kTokenAt + 4 * kRows;
  // What a block may have on the smallest part the sm_80 code runs on (8.6, 8.9); 512: TileSource.
  static_assert(kSharedBytes + 512 <= 99 * 1024, "does not fit consumer Ampere and Ada");
  static_assert(kHeadDim % 8 == 0 && kRows % 4 == 0 && kStageBytes % 16 == 0, "alignment");
};

// The largest row block that fits: 4 * rows * H bytes of float32 queries.
constexpr int max_rows(int head_dim) { return head_dim > 128 ? 32 : 64; }

}  // namespace directkv::cuda

// One block of query rows against its tokens, in one pass: the kernel each instruction set
// compiles.
#pragma once

#include "row_block.h"
#include "scores.h"
#include "softmax_row.h"
#include "values.h"

namespace directkv::cpu {
namespace {

constexpr int kGroupRows = 4;  // query rows that share a register-held key or value

// A run of tokens inside one page, or of the fresh tokens.
struct Tile {
  const char* keys;
  const char* values;
  int64_t stride;
  int64_t position;  // of its first token
  int tokens;
};

// Running state of the block: m and a vector of partial l per row, o in slot order.
template <DType kType>
struct BlockState {
  using Pack = typename Dot<kType>::Pack;
  // kMaxBlockElements, plus what rounding up to groups of rows (3 to 4) and to units (136 elements
  // to 160) adds at most.
  static constexpr int kSlots = kMaxBlockElements * 2;
  static constexpr int kRows = kMaxBlockRows * 4 / 3 + kGroupRows;

  alignas(64) Pack query[kSlots / kUnit];
  alignas(64) float o[kSlots];
  alignas(64) VF l[kRows];
  float m[kRows];
};

DIRECTKV_INLINE Range clip(int64_t first, int64_t last, const Tile& tile) {
  int64_t begin = first - tile.position, end = last - tile.position;
  if (begin < 0) begin = 0;
  if (end > tile.tokens) end = tile.tokens;
  if (end <= begin) return {0, 0};
  return {static_cast<int>(begin), static_cast<int>(end)};
}

// Rows [row, row + R) of the state (of them `real` exist) and one tile. `next`: the keys that will
// be read after this tile, or null.
template <DType kType, int R>
static void attend_group(const RowBlock& block, const RowShape& shape, BlockState<kType>& state,
                         int row, int real, const Tile& tile, const Range* seen, const char* next) {
  Range any = {tile.tokens, 0};  // tokens some row sees
  Range all = {0, tile.tokens};  // tokens every row sees
  for (int r = 0; r < real; ++r) {
    if (seen[r].begin == seen[r].end) {
      all.end = 0;
      continue;
    }
    if (seen[r].begin < any.begin) any.begin = seen[r].begin;
    if (seen[r].end > any.end) any.end = seen[r].end;
    if (seen[r].begin > all.begin) all.begin = seen[r].begin;
    if (seen[r].end < all.end) all.end = seen[r].end;
  }
  if (any.begin >= any.end) return;
  const char* keys = tile.keys + any.begin * tile.stride;
  const char* values = tile.values + any.begin * tile.stride;
  const int n = any.end - any.begin;
  const int slots = shape.all_units * kUnit;
  float* o = state.o + row * slots;

  Probabilities p;
  const char* keys_end = keys + n * tile.stride;
  const char* values_end = values + n * tile.stride;
  scores<kType, R>(keys, tile.stride, n, state.query + row * shape.all_units, shape, p.f32,
                   Ahead::over(keys, keys_end, next ? values : nullptr));
  for (int r = 0; r < real; ++r) {
    uint16_t* paired = nullptr;
#if defined(DIRECTKV_BF16_DOT)
    paired = p.bf16 + r * kTileTokens;
#endif
    const Range mine = seen[r].begin == seen[r].end
                           ? Range{0, 0}
                           : Range{seen[r].begin - any.begin, seen[r].end - any.begin};
    const float shrink = softmax_row<kType>(block, mine, n, p.f32 + r * kTileTokens, paired,
                                            &state.m[row + r], &state.l[row + r]);
    if (shrink != 1.0f) {
      for (int i = 0; i < slots; i += kLanes) {
        store(o + r * slots + i, load(o + r * slots + i) * shrink);
      }
    }
  }
  // Rows that only fill up the group repeat the last one; nobody reads them.
  for (int r = real; r < R; ++r) {
    __builtin_memcpy(p.f32 + r * kTileTokens, p.f32 + (real - 1) * kTileTokens,
                     sizeof(float) * kTileTokens);
#if defined(DIRECTKV_BF16_DOT)
    __builtin_memcpy(p.bf16 + r * kTileTokens, p.bf16 + (real - 1) * kTileTokens,
                     sizeof(uint16_t) * kTileTokens);
#endif
  }
  // A token that a row does not see must not be multiplied even by 0: it may hold NaN. The rows
  // share what all of them see, and add the rest one by one.
  if (all.begin >= all.end) all = {any.begin, any.begin};
  add_values<kType, R>(values, tile.stride, all.begin - any.begin, all.end - any.begin, p, 0, shape,
                       o, Ahead::over(values, values_end, next));
  const Ahead no_fetch = {nullptr, 0, 0};
  for (int r = 0; r < real; ++r) {
    if (seen[r].begin == seen[r].end) continue;
    const int begin = seen[r].begin - any.begin, end = seen[r].end - any.begin;
    const int shared_begin = all.begin - any.begin, shared_end = all.end - any.begin;
    if (shared_begin == shared_end) {
      add_values<kType, 1>(values, tile.stride, begin, end, p, r, shape, o + r * slots, no_fetch);
      continue;
    }
    add_values<kType, 1>(values, tile.stride, begin, shared_begin, p, r, shape, o + r * slots,
                         no_fetch);
    add_values<kType, 1>(values, tile.stride, shared_end, end, p, r, shape, o + r * slots,
                         no_fetch);
  }
}

// One head's rows, which start at `state_row` of the state, and one tile.
template <DType kType>
static void attend_tile(const RowBlock& block, const RowShape& shape, BlockState<kType>& state,
                        int state_row, const Tile& tile, bool fresh, const char* next) {
  for (int row = 0; row < block.rows; row += kGroupRows) {
    const int real = block.rows - row < kGroupRows ? block.rows - row : kGroupRows;
    Range seen[kGroupRows];
    for (int r = 0; r < real; ++r) {
      seen[r] = fresh ? clip(block.fresh_first[row + r], block.fresh_last[row + r], tile)
                      : clip(block.first[row + r], block.token_end, tile);
    }
    const char* upcoming = row == 0 ? next : nullptr;
    if (real == 1) {
      attend_group<kType, 1>(block, shape, state, state_row + row, real, tile, seen, upcoming);
    } else if (real == 2) {
      attend_group<kType, 2>(block, shape, state, state_row + row, real, tile, seen, upcoming);
    } else {
      attend_group<kType, 4>(block, shape, state, state_row + row, real, tile, seen, upcoming);
    }
  }
}

// The first head's tile that starts at cached token `position`: to the end of its page at most.
DIRECTKV_INLINE Tile cached_tile(const RowBlock& block, int64_t position) {
  const int64_t page = position / block.page_size;
  const int64_t offset = position - page * block.page_size;
  int64_t tokens = block.page_size - offset;
  if (tokens > kTileTokens) tokens = kTileTokens;
  if (tokens > block.token_end - position) tokens = block.token_end - position;
  const char* keys =
      block.tiles + block.page_table[page] * block.page_stride + offset * block.row_stride;
  return {keys, keys + block.value_offset, block.row_stride, position, static_cast<int>(tokens)};
}

template <DType kType>
static void attend_block(RowBlock& block) {
  using D = Dot<kType>;
  constexpr int kUnitBytes = kUnit * Format<kType>::kBytes;
  RowShape shape;
  shape.head_dim = block.head_dim;
  shape.units = block.head_dim / kUnit;
  shape.tail = block.head_dim % kUnit;
  shape.all_units = shape.units + (shape.tail > 0);
  shape.row_bytes = block.head_dim * Format<kType>::kBytes;
  const int slots = shape.all_units * kUnit;

  // Rows of the state per head: a last group of 3 takes the room of 4.
  const int head_rows = block.rows % kGroupRows == 3 ? block.rows + 1 : block.rows;
  BlockState<kType> state;
  for (int h = 0; h < block.heads; ++h) {
    for (int row = 0; row < head_rows; ++row) {
      const int source = h * block.rows + (row < block.rows ? row : block.rows - 1);
      const char* q = static_cast<const char*>(block.query[source]);
      const int at = h * head_rows + row;
      typename D::Pack* packed = state.query + at * shape.all_units;
      for (int u = 0; u < shape.units; ++u) packed[u] = D::load(q + u * kUnitBytes);
      if (shape.tail) packed[shape.units] = D::load_tail(q + shape.units * kUnitBytes, shape.tail);
      for (int i = 0; i < slots; i += kLanes) store(state.o + at * slots + i, VF{});
      state.l[at] = VF{};
      state.m[at] = -kInfinity;
    }
  }

  for (int64_t position = block.token_begin; position < block.token_end;) {
    const Tile first = cached_tile(block, position);
    position += first.tokens;
    const Tile next = position < block.token_end ? cached_tile(block, position) : first;
    for (int h = 0; h < block.heads; ++h) {
      Tile tile = first;
      tile.keys += h * block.head_stride;
      tile.values += h * block.head_stride;
      attend_tile<kType>(block, shape, state, h * head_rows, tile, false,
                         h + 1 < block.heads ? tile.keys + block.head_stride : next.keys);
    }
  }
  for (int64_t position = 0; position < block.fresh_tokens; position += kTileTokens) {
    int64_t tokens = block.fresh_tokens - position;
    if (tokens > kTileTokens) tokens = kTileTokens;
    for (int h = 0; h < block.heads; ++h) {
      const int64_t offset = position * block.fresh_stride + h * block.fresh_head_stride;
      const Tile tile = {block.fresh_key + offset, block.fresh_value + offset, block.fresh_stride,
                         position, static_cast<int>(tokens)};
      attend_tile<kType>(block, shape, state, h * head_rows, tile, true, nullptr);
    }
  }

  for (int i = 0; i < block.heads * block.rows; ++i) {
    const int row = i / block.rows * head_rows + i % block.rows;
    alignas(64) float lane[kLanes];
    store(lane, state.l[row]);
    float l = 0.0f;
    for (int j = 0; j < kLanes; ++j) l += lane[j];
    // The maximum skipped NaN logits; the sum has not.
    block.m[i] = l != l ? l : state.m[row];
    block.l[i] = l;
    for (int slot = 0; slot < slots; ++slot) {
      const int element = slot / kUnit * kUnit + output_element_of_slot<kType>(slot % kUnit);
      if (element < block.head_dim) block.o[i][element] = state.o[row * slots + slot];
    }
  }
}

static void attend_rows(RowBlock& block) {
  switch (block.dtype) {
    case DType::kBF16: return attend_block<DType::kBF16>(block);
    case DType::kF16: return attend_block<DType::kF16>(block);
    case DType::kF32: return attend_block<DType::kF32>(block);
  }
}

}  // namespace
}  // namespace directkv::cpu

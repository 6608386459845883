// The projection kernel: a few rows of x times the packed weights, then norms and RoPE.
//
// The weights are read once, and for as few rows as these their bytes are all that counts. A
// cluster has the columns of one head, each of its CTAs a share of D: one warp fetches it through a
// ring of stages, the others multiply, each 64 columns and 16 of the D elements of a stage. The
// columns are the 16 rows of a matrix instruction, the rows of x its 8 columns.
//
// Each row of a head belongs to one CTA of the cluster. All warps store their sums of it there,
// those of other CTAs past any fence: such stores complete on a barrier. One warp adds them in
// order, finishes the row, and raises its flag. The attend kernel waits for the flags of the heads
// it needs and not for the end of this kernel: that would come no sooner than what its own producer
// warps have begun to fetch. It may look at the flags once every CTA has let it start, which each
// does after clearing its own.
#pragma once

#include <cmath>

#include "elements.cuh"
#include "matrix.cuh"
#include "project_plan.h"
#include "stage_ring.cuh"
#include "tile_map.cuh"

namespace directkv::cuda {

// kGroups * 8: the most rows. kSide: warps side by side over a head.
template <DType kDType_, int kGroups_, int kSide_>
struct ProjectShape {
  static constexpr DType kDType = kDType_;
  static constexpr int kGroups = kGroups_, kSide = kSide_, kShares = kProjectWarps / kSide;
  static constexpr int kRows = project_stage_rows(kSide);  // of the weights, in a stage
  static constexpr int kColumnBytes = kRows * 128;         // of 64 columns: lines of 128 bytes
  static constexpr int kWeightBytes = kSide * kColumnBytes;
  static constexpr int kLineBytes = kRows * 2;  // of a row of x
  static constexpr int kBytes = kWeightBytes + 8 * kGroups * kLineBytes;
  static constexpr int kStageBytes = (kBytes + 1023) / 1024 * 1024;
  static constexpr int kStages = project_stages(kGroups);
  using Ring = StageRing<kStages, kStageBytes>;
  static constexpr int kRingBytes = kStages * (kStageBytes + 16) + 16;  // with all barriers

  static __host__ __device__ __forceinline__ int stages(int width) {
    return (width + kRows - 1) / kRows;
  }
  // Where 8 elements lie, swizzled as through the maps: columns of a row of the weights; of a row
  // of x.
  static __device__ __forceinline__ int weight(int row, int piece) {
    return piece / 8 * kColumnBytes + row * 128 + (piece % 8 ^ row % 8) * 16;
  }
  static __device__ __forceinline__ int x(int row, int piece) {
    const int line = row * kLineBytes;
    return kWeightBytes + line + (piece ^ line / 128 % (kLineBytes / 16)) * 16;
  }
};

// Both are read in boxes, with zeros beyond their edges.
struct ProjectMaps {
  BoxMap x;        // [rows, D]
  BoxMap weights;  // [D, K * (G + 2), H]
};

// The warp that fetches stages [begin, end) of a head.
template <typename Shape>
__device__ __forceinline__ void fetch_weights(const ProjectParams& p, const ProjectMaps& maps,
                                              typename Shape::Ring ring, int head, int begin,
                                              int end) {
#pragma unroll 1
  for (int i = begin; i < end; ++i, ring.advance()) {
    ring.acquire();
    unsigned char* const stage = ring.stage();
#if DIRECTKV_BULK_COPIES
    (void)p;
    if (lane_id() == 0) {
      barrier_arrive_expecting(ring.full(), Shape::kBytes);
#pragma unroll
      for (int side = 0; side < Shape::kSide; ++side)
        copy_box_at(stage + side * Shape::kColumnBytes, &maps.weights, side * kProjectColumns, head,
                    i * Shape::kRows, ring.full());
      copy_box_at(stage + Shape::kWeightBytes, &maps.x, i * Shape::kRows, 0, 0, ring.full());
    }
#else
    (void)maps;
    const auto copy = [](unsigned char* to, const void* array, int64_t element, bool there) {
      const auto* const from = static_cast<const unsigned char*>(array);
      copy_async_16_or_zeros(to, from + (there ? element * 2 : 0), there);
    };
    constexpr int kPieces = Shape::kSide * kProjectColumns / 8, kLine = Shape::kLineBytes / 16;
    const int64_t heads = int64_t{p.kv_heads} * (p.group + 2);
    for (int n = lane_id(); n < Shape::kRows * kPieces; n += 32) {
      const int row = n / kPieces, piece = n % kPieces, d = i * Shape::kRows + row;
      copy(stage + Shape::weight(row, piece), p.kernel, (d * heads + head) * p.head_dim + piece * 8,
           d < p.width && piece * 8 < p.head_dim);
    }
    for (int n = lane_id(); n < 8 * Shape::kGroups * kLine; n += 32) {
      const int row = n / kLine, piece = n % kLine, d = i * Shape::kRows + piece * 8;
      copy(stage + Shape::x(row, piece), p.x, int64_t{row} * p.width + d,
           row < p.rows && d < p.width);
    }
    barrier_arrive_after_copies(ring.full());
#endif
  }
}

// What a warp multiplies: x [8 * kGroups rows, D] and 64 columns of the weights.
template <typename Shape>
class Products {
 public:
  // Of row 8 * group + 2 * (lane % 4) + e % 2, column 16 * i + 8 * (e / 2) + lane / 4.
  float sum[Shape::kGroups][4][4] = {};  // group, i, e

  // Adds a stage. `side`: which 64 columns, `share`: which 16 elements of D. The result depends on
  // all that was loaded.
  __device__ __forceinline__ uint32_t add(const unsigned char* stage, int side, int share) {
    const int lane = lane_id(), row = 16 * share + lane % 8;
    uint32_t x[(Shape::kGroups + 1) / 2][4], loaded = 0;
#pragma unroll
    for (int pair = 0; pair < (Shape::kGroups + 1) / 2; ++pair) {
      const int group = min(2 * pair + lane / 16, Shape::kGroups - 1);
      load_matrices<false>(x[pair],
                           stage + Shape::x(8 * group + lane % 8, 2 * share + lane / 8 % 2));
      loaded ^= x[pair][0];
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t w[4];
      load_matrices<true>(
          w, stage + Shape::weight(row + lane / 16 * 8, side * 8 + 2 * i + lane / 8 % 2));
      loaded ^= w[0];
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group)
        multiply_add<Shape::kDType>(sum[group][i], w, x[group / 2][group % 2 * 2],
                                    x[group / 2][group % 2 * 2 + 1]);
    }
    return loaded;
  }
};

// One head of one row: bias, norm, RoPE, and where it goes. By one warp, lane l with elements l,
// l + 32, ...
template <DType kDType, int kPerLane>
class HeadOfRow {
  using E = typename Element<kDType>::type;

 public:
  // Loads what does not depend on the sums.
  __device__ __forceinline__ HeadOfRow(const ProjectParams& p, int head, int row)
      : row_(row), k_(head / (p.group + 2)), part_(head % (p.group + 2)) {
    const auto* const bias = static_cast<const E*>(p.bias);
    const auto* const norm = static_cast<const E*>(norm_of(p));
    const int half = half_of(p);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int h = lane_id() + 32 * i;
      const bool there = h < p.head_dim && row < p.rows, turns = there && h < 2 * half;
      const int64_t angle = int64_t{row} * half + (h < half ? h : h - half);
      bias_[i] =
          there && bias ? Element<kDType>::to_float(bias[int64_t{head} * p.head_dim + h]) : 0.0f;
      norm_[i] = there && norm ? Element<kDType>::to_float(norm[h]) + p.norm_offset : 1.0f;
      cos_[i] = turns ? p.cos[angle] : 1.0f;
      sin_[i] = turns ? p.sin[angle] : 0.0f;
    }
  }

  // Adds the sums [count, H] of all warps and writes the result. Their first line becomes scratch.
  __device__ __forceinline__ void finish(const ProjectParams& p, float* sums, int count) const {
    const int head_dim = p.head_dim;
    float x[kPerLane], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = bias_[i];
#pragma unroll 4
    for (int n = 0; n < count; ++n) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (lane_id() + 32 * i < head_dim) x[i] += sums[n * head_dim + lane_id() + 32 * i];
    }
    if (norm_of(p)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) squares += x[i] * x[i];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        squares += __shfl_xor_sync(kFullWarp, squares, offset);
      const float scale = 1.0f / std::sqrt(squares / static_cast<float>(head_dim) + p.norm_eps);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) x[i] *= scale * norm_[i];
    }
    const int half = half_of(p);
    if (half > 0) {
      __syncwarp();  // all have read the line
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (lane_id() + 32 * i < head_dim) sums[lane_id() + 32 * i] = x[i];
      __syncwarp();
    }
    const int64_t at = is_query(p) ? (int64_t{row_} * p.kv_heads + k_) * p.group + part_
                                   : int64_t{row_} * p.kv_heads + k_;
    E* const to = static_cast<E*>(is_query(p) ? p.query
                                  : is_key(p) ? p.key
                                              : p.value) +
                  at * head_dim;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int h = lane_id() + 32 * i;
      if (h >= head_dim) continue;
      if (h < 2 * half) {
        const float other = h < half ? -sums[h + half] : sums[h - half];
        x[i] = x[i] * cos_[i] + other * sin_[i];
      }
      to[h] = Element<kDType>::from_float(x[i]);
    }
  }

 private:
  __device__ __forceinline__ bool is_query(const ProjectParams& p) const { return part_ < p.group; }
  __device__ __forceinline__ bool is_key(const ProjectParams& p) const { return part_ == p.group; }
  __device__ __forceinline__ const void* norm_of(const ProjectParams& p) const {
    return is_query(p) ? p.query_norm : is_key(p) ? p.key_norm : nullptr;
  }
  __device__ __forceinline__ int half_of(const ProjectParams& p) const {
    return part_ <= p.group ? p.rotary_dim / 2 : 0;
  }

  int row_, k_, part_;
  float bias_[kPerLane], norm_[kPerLane], cos_[kPerLane], sin_[kPerLane];
};

// `ctas`: of a head, a cluster.
template <typename Shape>
__global__ void __launch_bounds__((kProjectWarps + 1) * 32, Shape::kGroups > 2 ? 3 : 4)
    project_kernel(const __grid_constant__ ProjectParams p, const __grid_constant__ int ctas,
                   const __grid_constant__ ProjectMaps maps) {
  wait_for_earlier_kernels();
  constexpr int kThreads = (kProjectWarps + 1) * 32, kRingIsReady = 1;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int head = static_cast<int>(blockIdx.x) / ctas, rank = cluster_rank();
  const int heads = p.kv_heads * (p.group + 2);
  // Row r belongs to CTA r % ctas, its line is r / ctas.
  const int lines = (p.rows - rank + ctas - 1) / ctas;
  const auto flag = [&](int line) {
    return p.projected + int64_t{rank + line * ctas} * heads + head;
  };
  unsigned char* const shared = dynamic_shared();
  auto* const barriers = reinterpret_cast<Barrier*>(shared + Shape::kStages * Shape::kStageBytes);
  Barrier* const sums_are_there = barriers + 2 * Shape::kStages;
  float* const sums = reinterpret_cast<float*>(shared + Shape::kRingBytes);  // [lines, parts, H]
  typename Shape::Ring ring(shared, barriers);
  const int stages = Shape::stages(p.width);
  const int begin = stages * rank / ctas, end = stages * (rank + 1) / ctas;
  const int side = warp % Shape::kSide, share = warp / Shape::kSide;
  Products<Shape> products;

  const int part = rank * Shape::kShares + share, parts = ctas * Shape::kShares;
  if (warp == kProjectWarps) {
    if (lane_id() == 0) {
      ring.init(DIRECTKV_BULK_COPIES ? 1 : 32, kProjectWarps);
#if DIRECTKV_BULK_COPIES
      barrier_init(sums_are_there, 1 + 32 * kProjectWarps);
      barrier_init_fence();
      const int from_others = parts - Shape::kShares;  // of each line
      barrier_arrive_expecting(sums_are_there, 4 * lines * from_others * p.head_dim);
#endif
    }
    __syncwarp();
    arrive_in_cluster();
    arrive_some(kRingIsReady, kThreads);
    fetch_weights<Shape>(p, maps, ring, head, begin, end);
  } else {
    arrive_in_cluster();
    if (warp == 0) {
      if (lane_id() < lines) clear_flag(flag(lane_id()));
      __syncwarp();
      let_next_kernel_start();  // one warp speaks for the CTA
    }
    sync_some(kRingIsReady, kThreads);
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const uint32_t loaded = products.add(ring.take(), side, share);
      ring.release_after(loaded);
    }
  }

  using Head = HeadOfRow<Shape::kDType, Shape::kSide * kProjectColumns / 32>;
  const int own_lines = warp < kProjectWarps ? lines : 0;  // of a warp: every fourth
  Head own(p, head, rank + warp * ctas);                   // loads arrive while the sums meet
  wait_for_cluster();
  if (warp < kProjectWarps) {
#pragma unroll
    for (int group = 0; group < Shape::kGroups; ++group)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * group + lane_id() % 4 * 2 + e;
        if (row >= p.rows) continue;
        float* const line = sums + (row / ctas * parts + part) * p.head_dim;
        const bool here = row % ctas == rank;
#if DIRECTKV_BULK_COPIES
        const ClusterFloats there(line, sums_are_there, row % ctas);
#endif
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int column = side * kProjectColumns + 8 * i + lane_id() / 4;
          if (column >= p.head_dim) continue;
          const float sum = products.sum[group][i / 2][i % 2 * 2 + e];
          if (here) line[column] = sum;
#if DIRECTKV_BULK_COPIES
          if (!here) there.store(column, sum);
#endif
        }
      }
#if DIRECTKV_BULK_COPIES
    barrier_arrive(sums_are_there);  // every lane for what it stored
#endif
  }
#if !DIRECTKV_BULK_COPIES
  __syncthreads();
#endif
  for (int line = warp; line < own_lines; line += kProjectWarps) {
#if DIRECTKV_BULK_COPIES
    barrier_wait_for_cluster(sums_are_there, 0);
    __syncwarp();
#endif
    if (line != warp) own = Head(p, head, rank + line * ctas);
    own.finish(p, sums + line * parts * p.head_dim, parts);
    __syncwarp();
    if (lane_id() == 0) raise_flag(flag(line));
  }
}

}  // namespace directkv::cuda

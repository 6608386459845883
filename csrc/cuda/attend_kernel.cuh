// The attend kernel: one producer warp fetches the tiles of this CTA's segments into a ring, the
// consumer warps attend to them. No CTA waits for another.
#pragma once

#include "device_limits.h"
#include "fma_attention.cuh"
#include "matrix_attention.cuh"

namespace directkv::cuda {

template <typename Attention>
__global__ void __launch_bounds__((Attention::kWarps + 1) * 32, Attention::kCtasPerSm)
    attend_kernel(const __grid_constant__ AttendParams p, const __grid_constant__ AttendGrid grid,
                  const __grid_constant__ TileMap map) {
  using Shape = typename Attention::Shape;
  unsigned char* const shared = dynamic_shared();
  TileRing<Shape> ring(shared, grid.stages);
  if (threadIdx.x == 0) {
    if (Shape::kSwizzled && p.cache.num_pages > 0) prefetch_map(&map);
    ring.init(Attention::kWarps);
  }
  __syncthreads();
  WorkCursor cursor;
  bool more = cursor.start(p, grid);
  if (threadIdx.x / 32 == Attention::kWarps) {
    TileProducer<Shape> producer(p, grid, &map, ring);
    for (; more; more = cursor.next(p, grid)) producer.fetch(cursor.segment());
    wait_for_earlier_kernels();
    return;
  }
  if (!p.projected) wait_for_earlier_kernels();
  unsigned char* const own = shared + grid.stages * TileRing<Shape>::kBytes;
  Attention attention(p, own);
  // In shared memory, one for each warp: registers are what the matrix fragments need.
  WorkCursor& kept = reinterpret_cast<WorkCursor*>(own + Attention::kSharedBytes)[threadIdx.x / 32];
  RingPosition at;
  while (more) {
    if (lane_id() == 0) kept = cursor;
    __syncwarp();
    const Segment& segment = kept.segment();
    if (p.projected) wait_for_projection(p, segment.b, segment.k);
    attention.begin(p, QueryRows(p, grid, segment));
    unsigned char* stage;
#pragma unroll 1
    for (int i = segment.tile_begin;;) {
      const Tile tile(grid, segment.row, segment.unit, i);
      stage = ring.take(at);
      attention.add(stage, tile);
      if (++i == segment.tile_end) break;
      ring.release(&at, tile.fresh);
    }
    attention.finish(SegmentOutput<Shape::kDType, Shape::kHeadDim>(p, grid, segment), stage);
    ring.release(&at, true);
    cursor = kept;
    more = cursor.next(p, grid);
    __syncwarp();
  }
  wait_for_earlier_kernels();
}

template <typename Attention>
cudaError_t launch_attention(const AttendParams& p, const AttendPlan& plan,
                             const DeviceLimits& limits, AttendGrid* grid, cudaStream_t stream) {
  using Shape = typename Attention::Shape;
  constexpr int kShared = Attention::kSharedBytes + Attention::kWarps * sizeof(WorkCursor);
  const auto stages = [&](int ctas_per_sm) {
    constexpr int kReserved = 1024;  // by the system, for each CTA
    const int share = limits.shared_per_sm / ctas_per_sm - kReserved;
    const int room = std::min(limits.shared_per_block, share) - kShared;
    return std::min(kMaxStages, room / TileRing<Shape>::kBytes);
  };
  int ctas_per_sm = Attention::kCtasPerSm;
  if (stages(ctas_per_sm) < kMinStages) ctas_per_sm = 1;  // parts with 100 KiB of shared memory
  grid->stages = stages(ctas_per_sm);
  if (p.projected && !p.pages_on_host)
    grid->stages =
        std::min(grid->stages, std::max(2, kRingBesideProjection / TileRing<Shape>::kBytes));
  if (grid->stages < 2) return cudaErrorInvalidConfiguration;
  const Memory memory = !p.pages_on_host       ? Memory::kHbm
                        : limits.coherent_link ? Memory::kC2c
                                               : Memory::kPcie;
  grid->ctas = p.num_ctas > 0 ? std::min(p.num_ctas, plan.max_ctas)
                              : choose_ctas(plan, memory, Shape::kDType == DType::kF32,
                                            limits.sm_count, ctas_per_sm);
  TileMap map = {};
  if (limits.bulk_copies && Shape::kSwizzled) {
    const CopyBox box = {grid->box_tokens, grid->box_tokens == Shape::kTokens ? Shape::kSpans : 1};
    const cudaError_t status =
        make_tile_map(&map, p.cache.layout, p.cache.pages,
                      p.cache.num_layers * p.cache.num_pages * p.cache.layout.kv_heads, box);
    if (status != cudaSuccess) return status;
  }
  const LaunchShape shape = {grid->ctas, (Attention::kWarps + 1) * 32,
                             static_cast<size_t>(grid->stages * TileRing<Shape>::kBytes + kShared)};
  return launch(attend_kernel<Attention>, shape, stream, p, *grid, map);
}

// Launches the instance for `plan.rows_per_block` rows: the smallest that holds them. Completes
// `*grid`, which the merge needs too.
template <DType kDType, int kHeadDim>
cudaError_t launch_attend(const AttendParams& p, const AttendPlan& plan, const DeviceLimits& limits,
                          AttendGrid* grid, cudaStream_t stream) {
  const auto with = [&](auto* attention) {
    using Attention = std::remove_pointer_t<decltype(attention)>;
    return launch_attention<Attention>(p, plan, limits, grid, stream);
  };
  constexpr int kMost = max_rows(kDType == DType::kF32 ? 4 : 2, kHeadDim);
  if constexpr (kDType == DType::kF32) {
    if (plan.rows_per_block <= 4) return with((FmaAttention<kDType, kHeadDim, 4>*)nullptr);
    if (plan.rows_per_block <= 16) return with((FmaAttention<kDType, kHeadDim, 16>*)nullptr);
    return with((FmaAttention<kDType, kHeadDim, kMost>*)nullptr);
  } else {
    if (plan.rows_per_block <= 16) return with((MatrixAttention<kDType, kHeadDim, 1>*)nullptr);
    if (plan.rows_per_block <= 32) return with((MatrixAttention<kDType, kHeadDim, 2>*)nullptr);
    if (plan.rows_per_block <= 64) return with((MatrixAttention<kDType, kHeadDim, 4>*)nullptr);
    return with((MatrixAttention<kDType, kHeadDim, kMost / 16>*)nullptr);
  }
}

}  // namespace directkv::cuda

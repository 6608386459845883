// read_pages, write_pages: whole pages between the cache and a dense device buffer.
#include <algorithm>

#include "device.cuh"
#include "kernels.h"

namespace directkv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;                    // independent 16-byte loads per thread
constexpr int64_t kRun = kThreads * kInFlight;  // pieces a CTA copies at a time
constexpr int64_t kMaxBlocks = 512;

// A run lies within one (page, layer), which is contiguous on both sides. The same id twice in a
// write leaves either content.
template <bool kWrite>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ PageCopyParams p, int64_t pieces, int64_t runs_per_page) {
  wait_for_earlier_kernels();
  const int64_t items = p.count * p.num_layers * runs_per_page;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t unit = item / runs_per_page;  // i * L + layer
    const int64_t i = unit / p.num_layers, layer = unit - i * p.num_layers;
    const int64_t begin = (item - unit * runs_per_page) * kRun + threadIdx.x;
    const int64_t id = p.page_ids[i];
    const bool in_pool = id >= 0 && id < p.num_pages;
    if (kWrite && !in_pool) continue;
    uint4* const page =
        static_cast<uint4*>(p.pages) + (in_pool ? (layer * p.num_pages + id) * pieces : 0);
    uint4* const dense = static_cast<uint4*>(p.buffer) + unit * pieces;
    const uint4* const from = kWrite ? dense : page;
    uint4* const to = kWrite ? page : dense;
    uint4 data[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t piece = begin + u * kThreads;
      data[u] = in_pool && piece < pieces ? from[piece] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t piece = begin + u * kThreads;
      if (piece < pieces) to[piece] = data[u];
    }
  }
}

template <bool kWrite>
cudaError_t copy_pages(const PageCopyParams& p, cudaStream_t stream) {
  const int64_t pieces = p.layout.page_bytes() / 16;
  if (p.count == 0 || p.num_layers == 0 || pieces == 0) return cudaSuccess;
  if (p.count < 0 || p.num_layers < 0 || p.layout.page_bytes() % 16 != 0) {
    return cudaErrorInvalidValue;
  }
  const int64_t runs_per_page = (pieces + kRun - 1) / kRun;
  const int64_t blocks = std::min(kMaxBlocks, p.count * p.num_layers * runs_per_page);
  return launch(copy_kernel<kWrite>, {blocks, kThreads}, stream, p, pieces, runs_per_page);
}

}  // namespace

cudaError_t read_pages(const PageCopyParams& p, cudaStream_t stream) {
  return copy_pages<false>(p, stream);
}

cudaError_t write_pages(const PageCopyParams& p, cudaStream_t stream) {
  return copy_pages<true>(p, stream);
}

}  // namespace directkv::cuda

// A captured CUDA graph is replayed with other lengths, tables, layers and data.
#include <cuda_runtime_api.h>

#include "../../csrc/cuda/kernels.h"
#include "check.h"
#include "cuda_device_case.h"

namespace directkv::test {
namespace {

TEST(graph_replays_with_changed_lengths) {
  for (Placement placement : placements()) {
    Shape s;
    s.dtype = DType::kBF16;
    s.head_dim = 128;
    s.group = 4;
    s.kv_heads = 2;
    s.batch = 3;
    s.query_tokens = 3;
    s.page_size = 32;
    s.max_pages = 5;
    AttendCase c(s, {150, 40, 7}, {3, 3, 2}, 23);
    DeviceCase device(c, placement);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    CUDA_CHECK(cuda::attend(device.params(), stream));
    CUDA_CHECK(cuda::append(device.append_params(), stream));
    CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    CUDA_CHECK(cudaGraphInstantiate(&replay, graph, 0));

    const std::vector<std::vector<int32_t>> lengths = {{150, 40, 7}, {0, 32, 1},     {64, 2, 7},
                                                       {33, 31, 6},  {149, -1, 161}, {20, 20, 5}};
    const std::vector<std::vector<int32_t>> seq = {{3, 3, 2}, {1, 0, 3}, {3, 3, 3},
                                                   {2, 1, 0}, {3, 3, 3}, {3, 3, 1}};
    for (size_t i = 0; i < lengths.size(); ++i) {
      // Shorter rows keep the pages of the first lengths; what a longer one lacks stays out of
      // range, and the row gives NaN.
      c.lengths = lengths[i];
      c.seq_lengths = seq[i];
      device.upload_pages();
      device.upload_bookkeeping();
      device.poison();
      CUDA_CHECK(cudaDeviceSynchronize());
      CUDA_CHECK(cudaGraphLaunch(replay, stream));
      CUDA_CHECK(cudaStreamSynchronize(stream));
      device.download_outputs();
      AttendCase sane = c;
      for (int b = 0; b < s.batch; ++b)
        if (lengths[i][b] < 0 || lengths[i][b] > s.capacity()) sane.seq_lengths[b] = 0;
      const OracleResult want = oracle(sane, 0, s.max_pages, true);
      std::vector<double> got, expected;
      for (size_t n = 0; n < want.out.size(); ++n) {
        const int b = static_cast<int>(n / (want.out.size() / s.batch));
        const int t = static_cast<int>(n / (s.heads() * s.head_dim)) % s.query_tokens;
        if (sane.seq_lengths[b] != c.seq_lengths[b]) {
          CHECK(t >= c.seq_lengths[b] || std::isnan(c.out_at(n)), "row %d cannot be served", b);
          continue;
        }
        got.push_back(c.out_at(n));
        expected.push_back(want.out[n]);
      }
      const double error = relative_error(got, expected);
      CHECK(error <= tolerance(s.dtype), "%s replay %zu: error %.3g", name(placement), i, error);
    }
    CUDA_CHECK(cudaGraphExecDestroy(replay));
    CUDA_CHECK(cudaGraphDestroy(graph));
    CUDA_CHECK(cudaStreamDestroy(stream));
  }
}

}  // namespace
}  // namespace directkv::test

// XLA FFI handlers of the benchmark primitives. The mark carries no command-buffer trait: an event
// recorded inside a CUDA graph could not be read.
#include <cuda_runtime_api.h>

#include <string>

#include "cuda/bench/kernels.h"
#include "targets.h"
#include "xla/ffi/api/ffi.h"

namespace directkv::handlers {
namespace {

namespace ffi = xla::ffi;
using Ints = ffi::Buffer<ffi::S32>;

ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("directkv benchmark: " + message);
}

ffi::Error to_error(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("directkv benchmark: ") + call + ": " +
                              cudaGetErrorString(status));
}

ffi::Error mark(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> out,
                int32_t slot, int32_t spin_us) {
  if (x.untyped_data() != out->untyped_data()) return invalid("the mark copied its operand");
  return to_error(bench::mark(slot, spin_us, stream), "mark");
}

ffi::Error read(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer after,
                ffi::Result<ffi::Buffer<ffi::U32>> checksums, int64_t bytes) {
  (void)after;  // an operand only so that XLA orders the read after it
  if (bytes < 0 || bytes % 16 != 0 || bytes > static_cast<int64_t>(data.size_bytes())) {
    return invalid("`bytes` should be a multiple of 16 up to the size of `data`");
  }
  return to_error(
      bench::read(data.untyped_data(), bytes, static_cast<int>(checksums->element_count()),
                  checksums->typed_data(), stream),
      "read");
}

// A baseline that reads host memory must not be handed a copy of it in HBM, nor the other way
// round.
ffi::Error check_residence(const ffi::AnyBuffer& cache, bool host) {
  cudaPointerAttributes at{};
  if (auto status = cudaPointerGetAttributes(&at, cache.untyped_data()); status != cudaSuccess) {
    cudaGetLastError();  // not sticky, and not ours to leave behind
    return to_error(status, "cudaPointerGetAttributes");
  }
  const auto wanted = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  return at.type == wanted ? ffi::Error::Success()
                           : invalid("the cache arrived in another memory: XLA copied it");
}

ffi::Error naive_attend(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key_cache,
                        ffi::AnyBuffer value_cache, Ints lengths, ffi::Result<ffi::AnyBuffer> out,
                        ffi::Result<ffi::Buffer<ffi::F32>> workspace, int32_t host, float scale) {
  const auto q = query.dimensions(), k = key_cache.dimensions(), v = value_cache.dimensions();
  if (q.size() != 4 || q[1] != 1 || k.size() != 4 || v.size() != 4 || k[0] != q[0] ||
      k[3] != q[3] || k[2] < 1 || q[2] % k[2] != 0) {
    return invalid("`query` should have shape (B, 1, N, H) and the caches (B, S, K, H)");
  }
  for (size_t i = 0; i < 4; ++i) {
    if (v[i] != k[i]) return invalid("`value_cache` should have the shape of `key_cache`");
  }
  const ffi::DataType dtype = query.element_type();
  if ((dtype != ffi::DataType::BF16 && dtype != ffi::DataType::F16) || q[3] % 8 != 0 ||
      q[3] > 256) {
    return invalid("the naive kernel takes bfloat16 or float16 and head dims of 8 to 256");
  }
  if (key_cache.element_type() != dtype || value_cache.element_type() != dtype ||
      out->element_type() != dtype || out->element_count() != query.element_count() ||
      lengths.element_count() != static_cast<size_t>(q[0])) {
    return invalid("dtypes of the operands, or the shapes of `out` or `lengths`, do not match");
  }
  const int64_t partial = q[0] * q[2] * (q[3] + 2);  // elements of one split
  const auto splits = static_cast<int64_t>(workspace->element_count()) / partial;
  if (splits < 1) return invalid("`workspace` should hold one split at least");
  for (const auto* cache : {&key_cache, &value_cache}) {
    if (auto error = check_residence(*cache, host != 0); error.failure()) return error;
  }
  bench::NaiveAttendParams params{};
  params.query = query.untyped_data();
  params.key_cache = key_cache.untyped_data();
  params.value_cache = value_cache.untyped_data();
  params.lengths = lengths.typed_data();
  params.out = out->untyped_data();
  params.workspace = workspace->typed_data();
  params.bf16 = dtype == ffi::DataType::BF16;
  params.batch = static_cast<int>(q[0]);
  params.query_heads = static_cast<int>(q[2]);
  params.kv_heads = static_cast<int>(k[2]);
  params.head_dim = static_cast<int>(q[3]);
  params.splits = static_cast<int>(splits);
  params.slots = k[1];
  params.scale = scale;
  return to_error(bench::naive_attend(params, stream), "naive_attend");
}

}  // namespace
}  // namespace directkv::handlers

#define DIRECTKV_BIND xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(DirectkvBenchMark, directkv::handlers::mark,
                              DIRECTKV_BIND
                                  .Arg<xla::ffi::AnyBuffer>()  // x
                                  .Ret<xla::ffi::AnyBuffer>()  // x, aliased
                                  .Attr<int32_t>("slot")
                                  .Attr<int32_t>("spin_us"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DirectkvBenchRead, directkv::handlers::read,
                              DIRECTKV_BIND
                                  .Arg<xla::ffi::AnyBuffer>()              // data
                                  .Arg<xla::ffi::AnyBuffer>()              // after
                                  .Ret<xla::ffi::Buffer<xla::ffi::U32>>()  // checksums
                                  .Attr<int64_t>("bytes"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(DirectkvNaiveAttend, directkv::handlers::naive_attend,
                              DIRECTKV_BIND
                                  .Arg<xla::ffi::AnyBuffer>()              // query
                                  .Arg<xla::ffi::AnyBuffer>()              // key_cache
                                  .Arg<xla::ffi::AnyBuffer>()              // value_cache
                                  .Arg<directkv::handlers::Ints>()         // lengths
                                  .Ret<xla::ffi::AnyBuffer>()              // out
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()  // workspace
                                  .Attr<int32_t>("host")
                                  .Attr<float>("scale"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

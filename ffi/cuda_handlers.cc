// XLA FFI handlers of the CUDA kernels. They carry the command-buffer trait: XLA may run them once,
// while it captures a CUDA graph, and replay what they launched.
#include <cuda_runtime_api.h>

#include "cuda_operands.h"
#include "targets.h"

namespace directkv::handlers {
namespace {

ffi::Error attend(cudaStream_t stream, ffi::AnyBuffer query, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, ffi::AnyBuffer pages, Ints page_table, Ints lengths,
                  Ints seq_lengths, Ints layer, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<Floats> lse, ffi::Result<ffi::AnyBuffer> workspace, int32_t page_size,
                  int32_t host, int32_t tracked, float scale, float soft_cap, int32_t window_left,
                  int32_t num_ctas) {
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_residence(pages, attributes); error.failure()) return error;
  AttendParams params{};
  if (auto error =
          make_attend(query, key, value, pages, page_table, lengths, seq_lengths, layer, *out, *lse,
                      attributes, scale, soft_cap, window_left, num_ctas, &params);
      error.failure()) {
    return error;
  }
  if (auto error = prepare_attend(*workspace, &params); error.failure()) return error;
  return to_error(cuda::attend(params, stream), "attend");
}

ffi::Error append(cudaStream_t stream, ffi::AnyBuffer pages, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, Ints page_table, Ints lengths, Ints seq_lengths, Ints layer,
                  ffi::AnyBuffer after, ffi::Result<ffi::AnyBuffer> out, int32_t page_size,
                  int32_t host, int32_t tracked) {
  (void)after;  // an operand only so that XLA orders this call after the one that made it
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_residence(pages, attributes); error.failure()) return error;
  AppendParams params{};
  if (auto error = make_append(pages, key, value, page_table, lengths, seq_lengths, layer, *out,
                               attributes, &params);
      error.failure()) {
    return error;
  }
  return to_error(cuda::append(params, stream), "append");
}

ffi::Error read_pages(cudaStream_t stream, ffi::AnyBuffer pages, Ints page_ids,
                      ffi::Result<ffi::AnyBuffer> data, int32_t page_size, int32_t host,
                      int32_t tracked) {
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_residence(pages, attributes); error.failure()) return error;
  PageCopyParams params{};
  if (auto error = make_page_copy(pages, *data, page_ids, attributes, &params); error.failure()) {
    return error;
  }
  return to_error(cuda::read_pages(params, stream), "read_pages");
}

ffi::Error write_pages(cudaStream_t stream, ffi::AnyBuffer pages, ffi::AnyBuffer data,
                       Ints page_ids, ffi::Result<ffi::AnyBuffer> out, int32_t page_size,
                       int32_t host, int32_t tracked) {
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_residence(pages, attributes); error.failure()) return error;
  if (auto error = check_in_place(pages, *out, attributes); error.failure()) return error;
  PageCopyParams params{};
  if (auto error = make_page_copy(pages, data, page_ids, attributes, &params); error.failure()) {
    return error;
  }
  return to_error(cuda::write_pages(params, stream), "write_pages");
}

}  // namespace
}  // namespace directkv::handlers

#define DIRECTKV_BIND_CONTEXT xla::ffi::Ffi::Bind().Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
#define DIRECTKV_TRAITS {xla::ffi::Traits::kCmdBufferCompatible}
#include "bind_targets.inc"

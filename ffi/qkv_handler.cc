// XLA FFI handler of the QKV projection fused with attention: two kernels of which the second
// starts before the first has ended. It reads the cache; what it makes lies in device memory.
#include "cuda/project_plan.h"
#include "cuda_operands.h"
#include "targets.h"

namespace directkv::handlers {
namespace {

// An operand of `count` elements, or of none.
ffi::Error optional(const char* name, const ffi::AnyBuffer& x, const ffi::AnyBuffer& pages,
                    int64_t count, const void** to) {
  *to = nullptr;
  if (x.element_count() == 0) return ffi::Error::Success();
  DIRECTKV_CHECK(
      x.element_type() == pages.element_type() && static_cast<int64_t>(x.element_count()) == count,
      std::string("`") + name + "` should have " + std::to_string(count) +
          " elements of the dtype of the cache, or none");
  *to = x.untyped_data();
  return ffi::Error::Success();
}

ffi::Error make_project(const ffi::AnyBuffer& x, const ffi::AnyBuffer& kernel,
                        const ffi::AnyBuffer& bias, const ffi::AnyBuffer& query_norm,
                        const ffi::AnyBuffer& key_norm, const Floats& cos, const Floats& sin,
                        const ffi::AnyBuffer& pages, const AttendParams& attend,
                        ProjectParams* params) {
  const PageLayout& layout = attend.cache.layout;
  const auto dims = x.dimensions(), weights = kernel.dimensions();
  DIRECTKV_CHECK(layout.dtype != DType::kF32 && x.element_type() == pages.element_type() &&
                     kernel.element_type() == pages.element_type(),
                 "`x`, `kernel` and the cache should have one 16-bit dtype");
  DIRECTKV_CHECK(
      dims.size() == 3 && dims[0] == attend.cache.batch && dims[1] == attend.query_tokens,
      "`x` should have shape (B, T, D)");
  params->dtype = layout.dtype;
  params->rows = static_cast<int>(dims[0] * dims[1]);
  params->width = static_cast<int>(dims[2]);
  params->kv_heads = layout.kv_heads;
  params->group = attend.query_heads / layout.kv_heads;
  params->head_dim = layout.head_dim;
  DIRECTKV_CHECK(dims[0] * dims[1] <= cuda::kMaxProjectRows,
                 "B * T should be at most " + std::to_string(cuda::kMaxProjectRows));
  DIRECTKV_CHECK(params->width > 0 && params->width % 8 == 0, "D should be a multiple of 8");
  DIRECTKV_CHECK(weights.size() == 4 && weights[0] == params->width &&
                     weights[1] == params->kv_heads && weights[2] == params->group + 2 &&
                     weights[3] == params->head_dim,
                 "`kernel` should have shape (D, K, G + 2, H)");
  params->x = x.untyped_data();
  params->kernel = kernel.untyped_data();
  const int64_t columns = weights[1] * weights[2] * weights[3];
  if (auto e = optional("bias", bias, pages, columns, &params->bias); e.failure()) return e;
  if (auto e = optional("query_norm", query_norm, pages, weights[3], &params->query_norm);
      e.failure())
    return e;
  if (auto e = optional("key_norm", key_norm, pages, weights[3], &params->key_norm); e.failure())
    return e;
  const auto turns = static_cast<int64_t>(cos.element_count());
  params->rotary_dim = params->rows ? static_cast<int>(2 * turns / params->rows) : 0;
  DIRECTKV_CHECK(sin.element_count() == cos.element_count() &&
                     int64_t{params->rows} * params->rotary_dim == 2 * turns &&
                     params->rotary_dim <= params->head_dim,
                 "`cos` and `sin` should have shape (B, T, 1, R / 2), R at most H");
  params->cos = cos.typed_data();
  params->sin = sin.typed_data();
  return ffi::Error::Success();
}

ffi::Error qkv_attend(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer kernel,
                      ffi::AnyBuffer bias, ffi::AnyBuffer query_norm, ffi::AnyBuffer key_norm,
                      Floats cos, Floats sin, ffi::AnyBuffer pages, Ints page_table, Ints lengths,
                      Ints seq_lengths, Ints layer, ffi::Result<ffi::AnyBuffer> out,
                      ffi::Result<Floats> lse, ffi::Result<ffi::AnyBuffer> query,
                      ffi::Result<ffi::AnyBuffer> key, ffi::Result<ffi::AnyBuffer> value,
                      ffi::Result<Ints> projected, ffi::Result<ffi::AnyBuffer> workspace,
                      int32_t page_size, int32_t host, int32_t tracked, float scale, float soft_cap,
                      int32_t window_left, int32_t num_ctas, float norm_eps, float norm_offset) {
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_residence(pages, attributes); error.failure()) return error;
  AttendParams params{};
  if (auto error =
          make_attend(*query, *key, *value, pages, page_table, lengths, seq_lengths, layer, *out,
                      *lse, attributes, scale, soft_cap, window_left, num_ctas, &params);
      error.failure()) {
    return error;
  }
  DIRECTKV_CHECK(params.fresh_tokens == params.query_tokens, "`key` should have T tokens");
  if (auto error = prepare_attend(*workspace, &params); error.failure()) return error;
  ProjectParams projection{};
  if (auto error =
          make_project(x, kernel, bias, query_norm, key_norm, cos, sin, pages, params, &projection);
      error.failure()) {
    return error;
  }
  projection.norm_eps = norm_eps;
  projection.norm_offset = norm_offset;
  projection.query = query->untyped_data();
  projection.key = key->untyped_data();
  projection.value = value->untyped_data();
  projection.projected = projected->typed_data();
  DIRECTKV_CHECK(static_cast<int64_t>(projected->element_count()) ==
                     int64_t{projection.rows} * projection.kv_heads * (projection.group + 2),
                 "`projected` should have shape (B * T, K * (G + 2))");
  params.projected = projection.projected;
  if (auto error = to_error(cuda::project(projection, stream), "project"); error.failure()) {
    return error;
  }
  return to_error(cuda::attend(params, stream), "attend");
}

}  // namespace
}  // namespace directkv::handlers

XLA_FFI_DEFINE_HANDLER_SYMBOL(DirectkvQkvAttend, directkv::handlers::qkv_attend,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::AnyBuffer>()         // x
                                  .Arg<xla::ffi::AnyBuffer>()         // kernel
                                  .Arg<xla::ffi::AnyBuffer>()         // bias
                                  .Arg<xla::ffi::AnyBuffer>()         // query_norm
                                  .Arg<xla::ffi::AnyBuffer>()         // key_norm
                                  .Arg<directkv::handlers::Floats>()  // cos
                                  .Arg<directkv::handlers::Floats>()  // sin
                                  .Arg<xla::ffi::AnyBuffer>()         // pages
                                  .Arg<directkv::handlers::Ints>()    // page_table
                                  .Arg<directkv::handlers::Ints>()    // lengths
                                  .Arg<directkv::handlers::Ints>()    // seq_lengths
                                  .Arg<directkv::handlers::Ints>()    // layer
                                  .Ret<xla::ffi::AnyBuffer>()         // out
                                  .Ret<directkv::handlers::Floats>()  // lse
                                  .Ret<xla::ffi::AnyBuffer>()         // query
                                  .Ret<xla::ffi::AnyBuffer>()         // key
                                  .Ret<xla::ffi::AnyBuffer>()         // value
                                  .Ret<directkv::handlers::Ints>()    // projected
                                  .Ret<xla::ffi::AnyBuffer>()         // workspace
                                  .Attr<int32_t>("page_size")
                                  .Attr<int32_t>("host")
                                  .Attr<int32_t>("tracked")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int32_t>("window_left")
                                  .Attr<int32_t>("num_ctas")
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("norm_offset"),
                              {xla::ffi::Traits::kCmdBufferCompatible});

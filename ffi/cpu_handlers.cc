// XLA FFI handlers of the CPU kernels.
#include "cpu/attend_plan.h"
#include "cpu/kernels.h"
#include "operands.h"
#include "targets.h"

namespace directkv::handlers {
namespace {

// Lends XLA's intra-op threads. The calling thread works too, hence one fewer.
cpu::Executor make_executor(ffi::ThreadPool& pool) {
  cpu::Executor executor;
  executor.workers = static_cast<int>(std::max<int64_t>(0, pool.num_threads() - 1));
  executor.schedule = [&pool](std::function<void()> task) { pool.Schedule(std::move(task)); };
  return executor;
}

ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer query, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, ffi::AnyBuffer pages, Ints page_table, Ints lengths,
                  Ints seq_lengths, Ints layer, ffi::Result<ffi::AnyBuffer> out,
                  ffi::Result<Floats> lse, ffi::Result<ffi::AnyBuffer> workspace, int32_t page_size,
                  int32_t host, int32_t tracked, float scale, float soft_cap, int32_t window_left,
                  int32_t num_ctas) {
  AttendParams params{};
  if (auto error =
          make_attend(query, key, value, pages, page_table, lengths, seq_lengths, layer, *out, *lse,
                      {page_size, host, tracked}, scale, soft_cap, window_left, num_ctas, &params);
      error.failure()) {
    return error;
  }
  const int64_t needed = cpu::attend_workspace_bytes(
      params.cache.batch, params.query_tokens, params.query_heads, params.cache.layout.kv_heads,
      params.cache.layout.head_dim, params.cache.max_pages);
  if (auto error = set_workspace(*workspace, needed, &params); error.failure()) return error;
  cpu::attend(params, make_executor(pool));
  return ffi::Error::Success();
}

ffi::Error append(ffi::ThreadPool pool, ffi::AnyBuffer pages, ffi::AnyBuffer key,
                  ffi::AnyBuffer value, Ints page_table, Ints lengths, Ints seq_lengths, Ints layer,
                  ffi::AnyBuffer after, ffi::Result<ffi::AnyBuffer> out, int32_t page_size,
                  int32_t host, int32_t tracked) {
  (void)after;  // an operand only so that XLA orders this call after the one that made it
  AppendParams params{};
  if (auto error = make_append(pages, key, value, page_table, lengths, seq_lengths, layer, *out,
                               {page_size, host, tracked}, &params);
      error.failure()) {
    return error;
  }
  cpu::append(params, make_executor(pool));
  return ffi::Error::Success();
}

ffi::Error read_pages(ffi::ThreadPool pool, ffi::AnyBuffer pages, Ints page_ids,
                      ffi::Result<ffi::AnyBuffer> data, int32_t page_size, int32_t host,
                      int32_t tracked) {
  PageCopyParams params{};
  if (auto error = make_page_copy(pages, *data, page_ids, {page_size, host, tracked}, &params);
      error.failure()) {
    return error;
  }
  cpu::read_pages(params, make_executor(pool));
  return ffi::Error::Success();
}

ffi::Error write_pages(ffi::ThreadPool pool, ffi::AnyBuffer pages, ffi::AnyBuffer data,
                       Ints page_ids, ffi::Result<ffi::AnyBuffer> out, int32_t page_size,
                       int32_t host, int32_t tracked) {
  const StorageAttributes attributes{page_size, host, tracked};
  if (auto error = check_in_place(pages, *out, attributes); error.failure()) return error;
  PageCopyParams params{};
  if (auto error = make_page_copy(pages, data, page_ids, attributes, &params); error.failure()) {
    return error;
  }
  cpu::write_pages(params, make_executor(pool));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace directkv::handlers

#define DIRECTKV_BIND_CONTEXT xla::ffi::Ffi::Bind().Ctx<xla::ffi::ThreadPool>()
#define DIRECTKV_TRAITS \
  {                     \
  }
#include "bind_targets.inc"

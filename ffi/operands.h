// From XLA buffers to the structs of csrc/params.h. Python has already said what is wrong in full
// sentences; here the same facts are checked tersely, so that no kernel runs on a wrong shape.
#pragma once

#include <string>

#include "buffer_registry.h"
#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace directkv::handlers {

namespace ffi = xla::ffi;
using Ints = ffi::Buffer<ffi::S32>;
using Floats = ffi::Buffer<ffi::F32>;

inline ffi::Error invalid(const std::string& message) {
  return ffi::Error::InvalidArgument("directkv: " + message);
}

#define DIRECTKV_CHECK(condition, message)     \
  do {                                         \
    if (!(condition)) return invalid(message); \
  } while (0)

// The static part of a call, the same for every target; see `Storage` in Python.
struct StorageAttributes {
  int32_t page_size;
  int32_t host;
  int32_t tracked;
};

inline bool to_dtype(ffi::DataType from, DType* to) {
  switch (from) {
    case ffi::DataType::BF16: *to = DType::kBF16; return true;
    case ffi::DataType::F16: *to = DType::kF16; return true;
    case ffi::DataType::F32: *to = DType::kF32; return true;
    default: return false;
  }
}

// pages [L, P, K, E]; E fixes the head dim once the page size is known.
inline ffi::Error make_layout(const ffi::AnyBuffer& pages, const StorageAttributes& attributes,
                              PageLayout* layout) {
  const auto dims = pages.dimensions();
  DIRECTKV_CHECK(dims.size() == 4, "`pages` should have shape (L, P, K, E)");
  DIRECTKV_CHECK(to_dtype(pages.element_type(), &layout->dtype),
                 "`pages` should be bfloat16, float16 or float32");
  DIRECTKV_CHECK(attributes.page_size > 0 && attributes.page_size % 16 == 0,
                 "`page_size` should be a multiple of 16");
  layout->page_size = attributes.page_size;
  layout->kv_heads = static_cast<int>(dims[2]);
  layout->head_dim = static_cast<int>(dims[3] / (int64_t{2} * attributes.page_size));
  DIRECTKV_CHECK(
      layout->head_dim > 0 && layout->head_dim % 8 == 0 && layout->tile_elements() == dims[3],
      "`pages` should have E = 2 * page_size * H elements in a tile");
  return ffi::Error::Success();
}

// The call writes in place, and into the cache rather than into a copy that XLA made of it.
inline ffi::Error check_in_place(const ffi::AnyBuffer& in, const ffi::AnyBuffer& out,
                                 const StorageAttributes& attributes) {
  DIRECTKV_CHECK(in.untyped_data() == out.untyped_data(), "the cache was not updated in place");
  if (attributes.tracked && !buffer_registered(out.untyped_data(), out.size_bytes())) {
    return ffi::Error(
        ffi::ErrorCode::kFailedPrecondition,
        "directkv: the cache was not donated, so XLA copied it and this step would write into the "
        "copy. Donate the cache, and only the cache, to the jitted function (donate_argnums); "
        "after "
        "a deliberate copy call cache.adopt().");
  }
  return ffi::Error::Success();
}

inline ffi::Error make_cache_view(const ffi::AnyBuffer& pages, const Ints& page_table,
                                  const Ints& lengths, const Ints& layer,
                                  const StorageAttributes& attributes, CacheView* view) {
  if (auto error = make_layout(pages, attributes, &view->layout); error.failure()) return error;
  const auto table = page_table.dimensions();
  DIRECTKV_CHECK(table.size() == 2, "`page_table` should have shape (B, max_pages)");
  DIRECTKV_CHECK(lengths.element_count() == static_cast<size_t>(table[0]),
                 "`lengths` should have shape (B,)");
  DIRECTKV_CHECK(layer.element_count() == 1, "`layer` should be a scalar");
  view->pages = pages.untyped_data();
  view->num_layers = pages.dimensions()[0];
  view->num_pages = pages.dimensions()[1];
  view->page_table = page_table.typed_data();
  view->lengths = lengths.typed_data();
  view->layer = layer.typed_data();
  view->batch = static_cast<int>(table[0]);
  view->max_pages = static_cast<int>(table[1]);
  return ffi::Error::Success();
}

// [B, T, heads, H] of the cache's dtype.
inline ffi::Error check_tokens(const char* name, const ffi::AnyBuffer& x,
                               const ffi::AnyBuffer& pages, const CacheView& view, int64_t heads) {
  const auto d = x.dimensions();
  DIRECTKV_CHECK(x.element_type() == pages.element_type(),
                 std::string("`") + name + "` should have the dtype of the cache");
  DIRECTKV_CHECK(d.size() == 4 && d[0] == view.batch && d[3] == view.layout.head_dim &&
                     (heads < 0 || d[2] == heads),
                 std::string("`") + name + "` should have shape (B, T, heads, H) of the cache");
  return ffi::Error::Success();
}

inline ffi::Error make_attend(const ffi::AnyBuffer& query, const ffi::AnyBuffer& key,
                              const ffi::AnyBuffer& value, const ffi::AnyBuffer& pages,
                              const Ints& page_table, const Ints& lengths, const Ints& seq_lengths,
                              const Ints& layer, const ffi::AnyBuffer& out, const Floats& lse,
                              const StorageAttributes& attributes, float scale, float soft_cap,
                              int32_t window_left, int32_t num_ctas, AttendParams* params) {
  CacheView& view = params->cache;
  if (auto e = make_cache_view(pages, page_table, lengths, layer, attributes, &view); e.failure())
    return e;
  const int heads = view.layout.kv_heads;
  if (auto e = check_tokens("query", query, pages, view, -1); e.failure()) return e;
  if (auto e = check_tokens("key", key, pages, view, heads); e.failure()) return e;
  if (auto e = check_tokens("value", value, pages, view, heads); e.failure()) return e;
  params->query_tokens = static_cast<int>(query.dimensions()[1]);
  params->query_heads = static_cast<int>(query.dimensions()[2]);
  params->fresh_tokens = static_cast<int>(key.dimensions()[1]);
  DIRECTKV_CHECK(heads > 0 && params->query_heads > 0 && params->query_heads % heads == 0,
                 "`query` should have a multiple of K heads");
  DIRECTKV_CHECK(params->fresh_tokens == 0 || params->fresh_tokens == params->query_tokens,
                 "`key` should have as many new tokens as `query`, or none");
  DIRECTKV_CHECK(value.dimensions()[1] == params->fresh_tokens,
                 "`value` should have as many tokens as `key`");
  DIRECTKV_CHECK(seq_lengths.element_count() == static_cast<size_t>(view.batch),
                 "`seq_lengths` should have shape (B,)");
  DIRECTKV_CHECK(
      out.element_count() == query.element_count() && out.element_type() == query.element_type(),
      "`out` should be like `query`");
  DIRECTKV_CHECK(
      lse.element_count() * static_cast<size_t>(view.layout.head_dim) == query.element_count(),
      "`lse` should have shape (B, T, N)");
  params->query = query.untyped_data();
  params->key = key.untyped_data();
  params->value = value.untyped_data();
  params->seq_lengths = seq_lengths.typed_data();
  params->out = out.untyped_data();
  params->lse = lse.typed_data();
  params->scale = scale;
  params->soft_cap = soft_cap;
  params->window_left = window_left;
  params->num_ctas = num_ctas;
  params->pages_on_host = attributes.host != 0;
  return ffi::Error::Success();
}

inline ffi::Error set_workspace(const ffi::AnyBuffer& workspace, int64_t needed,
                                AttendParams* params) {
  DIRECTKV_CHECK(static_cast<int64_t>(workspace.size_bytes()) >= needed,
                 "the workspace should have " + std::to_string(needed) + " bytes");
  params->workspace = workspace.untyped_data();
  return ffi::Error::Success();
}

inline ffi::Error make_append(const ffi::AnyBuffer& pages, const ffi::AnyBuffer& key,
                              const ffi::AnyBuffer& value, const Ints& page_table,
                              const Ints& lengths, const Ints& seq_lengths, const Ints& layer,
                              const ffi::AnyBuffer& out, const StorageAttributes& attributes,
                              AppendParams* params) {
  if (auto e = check_in_place(pages, out, attributes); e.failure()) return e;
  CacheView& view = params->cache;
  if (auto e = make_cache_view(pages, page_table, lengths, layer, attributes, &view); e.failure())
    return e;
  if (auto e = check_tokens("key", key, pages, view, view.layout.kv_heads); e.failure()) return e;
  if (auto e = check_tokens("value", value, pages, view, view.layout.kv_heads); e.failure())
    return e;
  DIRECTKV_CHECK(key.element_count() == value.element_count(),
                 "`key` and `value` should have the same shape");
  DIRECTKV_CHECK(seq_lengths.element_count() == static_cast<size_t>(view.batch),
                 "`seq_lengths` should have shape (B,)");
  params->key = key.untyped_data();
  params->value = value.untyped_data();
  params->seq_lengths = seq_lengths.typed_data();
  params->new_tokens = static_cast<int>(key.dimensions()[1]);
  return ffi::Error::Success();
}

inline ffi::Error make_page_copy(const ffi::AnyBuffer& pages, const ffi::AnyBuffer& data,
                                 const Ints& page_ids, const StorageAttributes& attributes,
                                 PageCopyParams* params) {
  if (auto e = make_layout(pages, attributes, &params->layout); e.failure()) return e;
  const auto p = pages.dimensions();
  const auto d = data.dimensions();
  DIRECTKV_CHECK(data.element_type() == pages.element_type(), "`data` should be like `pages`");
  DIRECTKV_CHECK(d.size() == 4 && d[1] == p[0] && d[2] == p[2] && d[3] == p[3] &&
                     page_ids.element_count() == static_cast<size_t>(d[0]),
                 "`data` should have shape (n, L, K, E), one entry for each of `page_ids`");
  params->pages = pages.untyped_data();
  params->buffer = data.untyped_data();
  params->page_ids = page_ids.typed_data();
  params->num_layers = p[0];
  params->num_pages = p[1];
  params->count = static_cast<int>(d[0]);
  return ffi::Error::Success();
}

}  // namespace directkv::handlers

#include "tile_map.cuh"

namespace directkv::cuda {

#if defined(DIRECTKV_EMULATE_CUDA)

cudaError_t make_tile_map(TileMap* map, const PageLayout& layout, const void* pages, int64_t tiles,
                          const CopyBox& box) {
  *map = {static_cast<const unsigned char*>(pages),
          layout.head_dim * itemsize(layout.dtype),
          layout.page_size,
          tiles,
          kSwizzledBytes,
          box.tokens,
          box.spans};
  return cudaSuccess;
}

cudaError_t make_token_map(TokenMap* map, const PageLayout& layout, const void* tokens, int batch,
                           int count, int box_tokens) {
  const int head_bytes = layout.head_dim * itemsize(layout.dtype);
  *map = {static_cast<const unsigned char*>(tokens),
          batch,
          count,
          layout.kv_heads * head_bytes,
          head_bytes,
          box_tokens};
  return cudaSuccess;
}

#else

namespace {

// The runtime finds the driver's function, so that nothing links against the driver.
decltype(&cuTensorMapEncodeTiled) encode_function() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess) {
      cudaGetLastError();
      entry = nullptr;
    }
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry);
  }();
  return function;
}

}  // namespace

cudaError_t make_tile_map(TileMap* map, const PageLayout& layout, const void* pages, int64_t tiles,
                          const CopyBox& box) {
  if (tiles <= 0) return cudaSuccess;  // an empty pool: no row can be served from it
  const auto encode = encode_function();
  if (!encode) return cudaErrorNotSupported;
  const int item = itemsize(layout.dtype);
  const cuuint64_t row = static_cast<cuuint64_t>(layout.head_dim) * item;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(kSwizzledBytes / item),
                              static_cast<cuuint64_t>(2 * layout.page_size),
                              static_cast<cuuint64_t>(tiles), row / kSwizzledBytes};
  // The last stride is the shortest: a span is a part of a row.
  const cuuint64_t strides[] = {row, static_cast<cuuint64_t>(layout.tile_bytes()),
                                static_cast<cuuint64_t>(kSwizzledBytes)};
  const cuuint32_t extent[] = {static_cast<cuuint32_t>(kSwizzledBytes / item),
                               static_cast<cuuint32_t>(box.tokens), 1,
                               static_cast<cuuint32_t>(box.spans)};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, item == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 4,
             const_cast<void*>(pages), sizes, strides, extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t make_token_map(TokenMap* map, const PageLayout& layout, const void* tokens, int batch,
                           int count, int box_tokens) {
  const auto encode = encode_function();
  if (!encode) return cudaErrorNotSupported;
  const int item = itemsize(layout.dtype);
  const cuuint64_t token = static_cast<cuuint64_t>(layout.kv_heads) * layout.head_dim * item;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(kSwizzledBytes / item),
                              static_cast<cuuint64_t>(count), token / kSwizzledBytes,
                              static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[] = {token, static_cast<cuuint64_t>(kSwizzledBytes), token * count};
  const cuuint32_t extent[] = {static_cast<cuuint32_t>(kSwizzledBytes / item),
                               static_cast<cuuint32_t>(box_tokens),
                               static_cast<cuuint32_t>(layout.head_dim * item / kSwizzledBytes), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult status =
      encode(map, item == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16, 4,
             const_cast<void*>(tokens), sizes, strides, extent, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#endif

}  // namespace directkv::cuda

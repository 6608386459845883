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

cudaError_t make_box_map(BoxMap* map, const void* array, const Extent3& size, const Extent3& box) {
  *map = {static_cast<const unsigned char*>(array), size.x, size.y, size.z, box.x, box.y, box.z};
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

// A map of swizzled 16-byte pieces: spans of 128 bytes, and three more dimensions with their
// strides in bytes; a copy brings `extent` of each.
cudaError_t make_map(CUtensorMap* map, DType dtype, const void* data, const cuuint64_t (&sizes)[3],
                     const cuuint64_t (&strides)[3], const cuuint32_t (&extent)[3]) {
  const auto encode = encode_function();
  if (!encode) return cudaErrorNotSupported;
  const int span = kSwizzledBytes / itemsize(dtype);
  const cuuint64_t all_sizes[] = {static_cast<cuuint64_t>(span), sizes[0], sizes[1], sizes[2]};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(span), extent[0], extent[1], extent[2]};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult status = encode(
      map, itemsize(dtype) == 4 ? CU_TENSOR_MAP_DATA_TYPE_UINT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      4, const_cast<void*>(data), all_sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cuuint32_t small(int64_t x) { return static_cast<cuuint32_t>(x); }
cuuint64_t large(int64_t x) { return static_cast<cuuint64_t>(x); }

}  // namespace

cudaError_t make_tile_map(TileMap* map, const PageLayout& layout, const void* pages, int64_t tiles,
                          const CopyBox& box) {
  if (tiles <= 0) return cudaSuccess;  // an empty pool: no row can be served from it
  const int row = layout.head_dim * itemsize(layout.dtype);
  // The last stride is the shortest: a span is a part of a row.
  return make_map(map, layout.dtype, pages,
                  {large(2 * layout.page_size), large(tiles), large(row / kSwizzledBytes)},
                  {large(row), large(layout.tile_bytes()), large(kSwizzledBytes)},
                  {small(box.tokens), 1, small(box.spans)});
}

cudaError_t make_token_map(TokenMap* map, const PageLayout& layout, const void* tokens, int batch,
                           int count, int box_tokens) {
  const int head = layout.head_dim * itemsize(layout.dtype);
  const int64_t token = int64_t{layout.kv_heads} * head;
  return make_map(map, layout.dtype, tokens,
                  {large(count), large(token / kSwizzledBytes), large(batch)},
                  {large(token), large(kSwizzledBytes), large(token * count)},
                  {small(box_tokens), small(head / kSwizzledBytes), 1});
}

cudaError_t make_box_map(BoxMap* map, const void* array, const Extent3& size, const Extent3& box) {
  const auto encode = encode_function();
  if (!encode) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {large(size.x), large(size.y), large(size.z)};
  const cuuint64_t strides[] = {large(2 * int64_t{size.x}), large(2 * int64_t{size.x} * size.y)};
  const cuuint32_t extent[] = {small(box.x), small(box.y), small(box.z)};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle = box.x == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.x == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                   : CU_TENSOR_MAP_SWIZZLE_32B;
  const CUresult status =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 3, const_cast<void*>(array), sizes, strides,
             extent, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

#endif

}  // namespace directkv::cuda

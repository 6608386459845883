// The projection kernel: a few rows of x times the packed weights, then norms and RoPE.
//
// The weights are read once, and for as few rows as these their bytes are all that counts. A
// cluster has the columns of one head, each of its CTAs a share of D, and so has each warp of a
// CTA: 64 columns and every eighth of them. Weights go straight from memory into registers; what a
// matrix instruction wants as pairs down a column is put together from two rows. Which 16 of the D
// elements an instruction multiplies does not matter, as long as x agrees: lane l takes elements 8
// (l % 4) to 8 (l % 4) + 7 of 32, so that it loads whole pieces of 16 bytes of x, and of 8 rows of
// the weights.
//
// The sums of the warps meet in shared memory, those of the CTAs through the cluster, and each row
// of a head is finished by one warp.
#pragma once

#include <cmath>

#include "elements.cuh"
#include "matrix.cuh"

namespace directkv::cuda {

constexpr int kProjectWarps = 8;
constexpr int kProjectColumns = 64;  // of a warp
constexpr int kProjectChunk = 32;    // elements of D that a warp multiplies at once

// Warps side by side over the columns of a head; the others share D.
inline __host__ __device__ int project_column_warps(int head_dim) {
  return head_dim <= kProjectColumns ? 1 : head_dim <= 2 * kProjectColumns ? 2 : 4;
}

// The sums of 32 rows take half the registers of a thread.
constexpr int project_ctas_per_sm(int row_tiles) { return row_tiles == 1 ? 2 : 1; }

// Two rows of weights as pairs down the columns: element `odd` of each register.
__device__ __forceinline__ uint32_t down_the_column(uint32_t upper, uint32_t lower, int odd) {
  return odd ? upper >> 16 | (lower & 0xffff0000u) : (upper & 0xffffu) | lower << 16;
}

// What a warp multiplies: x [kRowTiles * 16 rows, D] and 64 columns of the weights, some chunks of
// D.
template <DType kDType, int kRowTiles>
class Products {
 public:
  float sum[kRowTiles][8][4] = {};  // tile, i, element: column 8 * n + i where C has column n

  __device__ __forceinline__ Products(const ProjectParams& p, int head, int first_column) : p_(p) {
    const int column = first_column + 8 * (lane_id() / 4);
    has_columns_ = column < p.head_dim;
    stride_ = int64_t{p.kv_heads} * (p.group + 2) * p.head_dim / 8;
    weights_ = static_cast<const uint4*>(p.kernel) +
               (int64_t{head} * p.head_dim + (has_columns_ ? column : 0)) / 8;
  }

  // Adds chunks [begin, end), the weights loaded two ahead.
  __device__ __forceinline__ void add(int begin, int end) {
    Weights weights[kAhead];
    weights_ += first_element(begin) * stride_;
#pragma unroll
    for (int a = 0; a < kAhead; ++a) load(&weights[a], begin + a, end);
#pragma unroll 1
    for (int chunk = begin; chunk < end; chunk += kAhead) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (chunk + a < end) multiply(weights[a], chunk + a);
        load(&weights[a], chunk + a + kAhead, end);
      }
    }
  }

 private:
  static constexpr int kAhead = 2;
  struct Weights {
    uint4 rows[8];
  };

  static __device__ __forceinline__ int first_element(int chunk) {
    return chunk * kProjectChunk + lane_id() % 4 * 8;
  }

  // The chunks come in turn.
  __device__ __forceinline__ void load(Weights* w, int chunk, int end) {
    const bool there = chunk < end && first_element(chunk) < p_.width && has_columns_;
    const uint4* at = weights_;
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      w->rows[r] = there ? load_once(at) : uint4{0, 0, 0, 0};
      at += stride_;
    }
    weights_ += kProjectChunk * stride_;
  }

  __device__ __forceinline__ void multiply(const Weights& weights, int chunk) {
    const int element = first_element(chunk);
    uint4 x[kRowTiles][2];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = tile * 16 + i * 8 + lane_id() / 4;
        const auto* const from = static_cast<const uint4*>(p_.x);
        x[tile][i] = row < p_.rows && element < p_.width
                         ? from[(int64_t{row} * p_.width + element) / 8]
                         : uint4{0, 0, 0, 0};
      }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 &low = x[tile][0], &high = x[tile][1];
        a[tile][0] = step ? low.z : low.x, a[tile][1] = step ? high.z : high.x;
        a[tile][2] = step ? low.w : low.y, a[tile][3] = step ? high.w : high.y;
      }
      const uint4* const w = weights.rows + 4 * step;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t b0 = down_the_column(word(w[0], i / 2), word(w[1], i / 2), i % 2);
        const uint32_t b1 = down_the_column(word(w[2], i / 2), word(w[3], i / 2), i % 2);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile)
          multiply_add<kDType>(sum[tile][i], a[tile], b0, b1);
      }
    }
  }

  static __device__ __forceinline__ uint32_t word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  const ProjectParams& p_;
  const uint4* weights_;  // of this lane's columns, in the next chunk
  int64_t stride_;        // of a row
  bool has_columns_;
};

// One head of one row: bias, norm, RoPE, and where it goes. By one warp, lane l with elements l,
// l + 32, ...
template <DType kDType>
class HeadOfRow {
  using E = typename Element<kDType>::type;

 public:
  // Loads what does not depend on the sums.
  __device__ __forceinline__ HeadOfRow(const ProjectParams& p, int head, int row)
      : row_(row), k_(head / (p.group + 2)), part_(head % (p.group + 2)) {
    const auto* const bias = static_cast<const E*>(p.bias);
    const auto* const norm = static_cast<const E*>(norm_of(p));
    const int half = half_of(p);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int h = lane_id() + 32 * i;
      const bool there = h < p.head_dim && row < p.rows, turns = there && h < 2 * half;
      const int64_t angle = int64_t{row} * half + (h < half ? h : h - half);
      bias_[i] =
          there && bias ? Element<kDType>::to_float(bias[int64_t{head} * p.head_dim + h]) : 0.0f;
      norm_[i] = there && norm ? Element<kDType>::to_float(norm[h]) + p.norm_offset : 1.0f;
      cos_[i] = turns ? p.cos[angle] : 1.0f;
      sin_[i] = turns ? p.sin[angle] : 0.0f;
    }
  }

  // Adds the sums of all CTAs of the cluster and writes the result. `line`: H floats of scratch.
  __device__ __forceinline__ void finish(const ProjectParams& p, const float* sums, int ctas,
                                         float* line) const {
    const int head_dim = p.head_dim;
    float x[kPerLane], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) x[i] = bias_[i];
#pragma unroll 4
    for (int rank = 0; rank < ctas; ++rank) {
      const float* const from = of_rank(sums, rank) + int64_t{row_} * head_dim;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (lane_id() + 32 * i < head_dim) x[i] += from[lane_id() + 32 * i];
    }
    if (norm_of(p)) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) squares += x[i] * x[i];
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2)
        squares += __shfl_xor_sync(kFullWarp, squares, offset);
      const float scale = 1.0f / std::sqrt(squares / static_cast<float>(head_dim) + p.norm_eps);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) x[i] *= scale * norm_[i];
    }
    const int half = half_of(p);
    if (half > 0) {
      __syncwarp();  // the line of the last row has been read
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (lane_id() + 32 * i < head_dim) line[lane_id() + 32 * i] = x[i];
      __syncwarp();
    }
    const int64_t at = is_query(p) ? (int64_t{row_} * p.kv_heads + k_) * p.group + part_
                                   : int64_t{row_} * p.kv_heads + k_;
    E* const to = static_cast<E*>(is_query(p) ? p.query
                                  : is_key(p) ? p.key
                                              : p.value) +
                  at * head_dim;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int h = lane_id() + 32 * i;
      if (h >= head_dim) continue;
      if (h < 2 * half) {
        const float other = h < half ? -line[h + half] : line[h - half];
        x[i] = x[i] * cos_[i] + other * sin_[i];
      }
      to[h] = Element<kDType>::from_float(x[i]);
    }
  }

 private:
  static constexpr int kPerLane = 256 / 32;

  __device__ __forceinline__ bool is_query(const ProjectParams& p) const { return part_ < p.group; }
  __device__ __forceinline__ bool is_key(const ProjectParams& p) const { return part_ == p.group; }
  __device__ __forceinline__ const void* norm_of(const ProjectParams& p) const {
    return is_query(p) ? p.query_norm : is_key(p) ? p.key_norm : nullptr;
  }
  __device__ __forceinline__ int half_of(const ProjectParams& p) const {
    return part_ <= p.group ? p.rotary_dim / 2 : 0;
  }

  int row_, k_, part_;
  float bias_[kPerLane], norm_[kPerLane], cos_[kPerLane], sin_[kPerLane];
};

template <DType kDType, int kRowTiles>
__global__ void __launch_bounds__(kProjectWarps * 32, project_ctas_per_sm(kRowTiles))
    project_kernel(const __grid_constant__ ProjectParams p, const __grid_constant__ int ctas) {
  constexpr int kRows = kRowTiles * 16;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
  const int head = static_cast<int>(blockIdx.x) / ctas, rank = cluster_rank();
  const int side = project_column_warps(p.head_dim), shares = kProjectWarps / side;
  const int first_column = warp % side * kProjectColumns, share = warp / side;
  float* const sums = reinterpret_cast<float*>(dynamic_shared());  // [shares, kRows, H]
  const int plane = kRows * p.head_dim;
  {
    Products<kDType, kRowTiles> products(p, head, first_column);
    const int chunks = (p.width + kProjectChunk - 1) / kProjectChunk;
    const int part = rank * shares + share, parts = ctas * shares;
    products.add(chunks * part / parts, chunks * (part + 1) / parts);
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = tile * 16 + e / 2 * 8 + lane_id() / 4;
        const int column = first_column + 8 * (lane_id() % 4 * 2 + e % 2);
        if (column >= p.head_dim || row >= p.rows) continue;
        auto* const to =
            reinterpret_cast<float4*>(sums + share * plane + row * p.head_dim + column);
        const auto& s = products.sum[tile];
        to[0] = {s[0][e], s[1][e], s[2][e], s[3][e]};
        to[1] = {s[4][e], s[5][e], s[6][e], s[7][e]};
      }
  }
  int row = rank * kProjectWarps + warp;
  HeadOfRow<kDType> last(p, head, row);  // its loads arrive while the sums meet
  __syncthreads();
  for (int i = thread; i < p.rows * p.head_dim; i += kProjectWarps * 32) {
    float sum = sums[i];
    for (int s = 1; s < shares; ++s) sum += sums[s * plane + i];
    sums[i] = sum;
  }
  sync_cluster();
  float* const line = sums + shares * plane + warp * p.head_dim;
  while (row < p.rows) {
    last.finish(p, sums, ctas, line);
    row += ctas * kProjectWarps;
    if (row < p.rows) last = HeadOfRow<kDType>(p, head, row);
  }
  leave_cluster();  // no CTA ends while another reads its sums
}

}  // namespace directkv::cuda

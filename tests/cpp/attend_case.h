// One attend problem with its memory, and the double-precision oracle over it.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "../../csrc/params.h"
#include "scalar_types.h"

namespace directkv::test {

struct Shape {
  DType dtype = DType::kF32;
  int batch = 1, query_tokens = 1, kv_heads = 1, group = 1, head_dim = 64;
  int page_size = 16, max_pages = 4, layers = 2, layer = 1;
  bool fresh = true;
  float scale = 0.0f;  // 0: 1/sqrt(H)
  float soft_cap = 0.0f;
  int window_left = -1;
  int num_ctas = 0, ring_slot_bytes = 0;  // CUDA

  int heads() const { return kv_heads * group; }
  int capacity() const { return max_pages * page_size; }
  std::string text() const;
};

// Every slot of every page holds NaN except the tokens the rows have; page tables are a random
// permutation of a pool with spare pages, entries past a row's need are out of range.
class AttendCase {
 public:
  AttendCase(const Shape& shape, std::vector<int> lengths, std::vector<int> seq_lengths,
             uint32_t seed);

  AttendParams params();
  // Element index into `pages` of cached key (or value) element h of token s.
  int64_t cached(int b, int s, int k, int h, bool value) const;

  double out_at(int64_t i) const { return decode(shape.dtype, out.data(), i); }
  void poison_outputs();

  Shape shape;
  int64_t pool_pages;
  int32_t layer;
  std::vector<int32_t> lengths, seq_lengths, page_table;
  std::vector<char> pages, query, key, value, out;
  std::vector<float> lse, workspace;
};

struct OracleResult {
  std::vector<double> out, lse, m, l, o;  // out [B,T,N,H], o the same, not divided
};

// Tokens of pages [page_begin, page_end), and the fresh ones where `with_fresh`.
OracleResult oracle(const AttendCase& c, int page_begin, int page_end, bool with_fresh);

// ||a - b|| / ||b||; NaN counts as equal to NaN, and as infinitely far from a number.
double relative_error(const std::vector<double>& a, const std::vector<double>& b);

// out of a case.
std::vector<double> outputs(const AttendCase& c);

// The largest difference of lse, absolutely: it is a logarithm.
double lse_gap(const AttendCase& c, const std::vector<double>& want);

// What a kernel of the dtype may deviate from the oracle.
double tolerance(DType dtype);

}  // namespace directkv::test

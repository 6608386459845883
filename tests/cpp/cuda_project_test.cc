// project, alone and with attend behind it.
#include <algorithm>
#include <cmath>
#include <random>

#include "../../csrc/cuda/kernels.h"
#include "../../csrc/cuda/project_plan.h"
#include "check.h"
#include "cuda_device_case.h"
#if defined(DIRECTKV_EMULATE_CUDA)
#include "cuda_emulation.h"
#endif

namespace directkv::test {
namespace {

struct ProjectShape {
  DType dtype = DType::kBF16;
  int rows = 1, width = 64, kv_heads = 1, group = 1, head_dim = 64, rotary_dim = 0;
  bool bias = false, norms = false;
  int ctas_per_head = 0;

  int heads() const { return kv_heads * (group + 2); }
};

// Operands in host memory, as they are and as doubles.
class ProjectCase {
 public:
  ProjectCase(const ProjectShape& shape, uint32_t seed) : shape(shape), rng_(seed) {
    const size_t columns = static_cast<size_t>(shape.heads()) * shape.head_dim;
    x = random(static_cast<size_t>(shape.rows) * shape.width, 1.0);
    kernel = random(shape.width * columns, 1.0 / std::sqrt(shape.width));
    bias = random(columns, 1.0);
    query_norm = random(shape.head_dim, 1.0);
    key_norm = random(shape.head_dim, 1.0);
    for (int i = 0; i < shape.rows * shape.rotary_dim / 2; ++i) {
      const float angle = static_cast<float>(rng_() % 1000);
      cos.push_back(1.25f * std::cos(angle));
      sin.push_back(1.25f * std::sin(angle));
    }
    cos.push_back(0.0f), sin.push_back(0.0f);  // never empty
  }

  double at(const std::vector<char>& array, int64_t i) const {
    return decode(shape.dtype, array.data(), i);
  }

  // [rows, heads, H] in the order of the packed weights.
  std::vector<double> oracle() const {
    const int H = shape.head_dim, half = shape.rotary_dim / 2, parts = shape.group + 2;
    std::vector<double> all(static_cast<size_t>(shape.rows) * shape.heads() * H);
    for (int row = 0; row < shape.rows; ++row)
      for (int head = 0; head < shape.heads(); ++head) {
        double* const y = all.data() + (int64_t{row} * shape.heads() + head) * H;
        double squares = 0.0;
        for (int h = 0; h < H; ++h) {
          const int64_t column = int64_t{head} * H + h;
          for (int d = 0; d < shape.width; ++d)
            y[h] += at(x, int64_t{row} * shape.width + d) *
                    at(kernel, int64_t{d} * shape.heads() * H + column);
          if (shape.bias) y[h] += at(bias, column);
          squares += y[h] * y[h];
        }
        if (head % parts > shape.group) continue;  // a value
        const auto& norm = head % parts < shape.group ? query_norm : key_norm;
        for (int h = 0; shape.norms && h < H; ++h)
          y[h] *= (at(norm, h) + kNormOffset) / std::sqrt(squares / H + kNormEps);
        for (int i = 0; i < half; ++i) {
          const double c = cos[row * half + i], s = sin[row * half + i];
          const double first = y[i], second = y[i + half];
          y[i] = first * c - second * s;
          y[i + half] = second * c + first * s;
        }
      }
    return all;
  }

  std::string text() const {
    char buffer[200];
    std::snprintf(buffer, sizeof(buffer),
                  "dtype %d rows %d D %d K %d G %d H %d R %d bias %d norms %d ctas %d",
                  static_cast<int>(shape.dtype), shape.rows, shape.width, shape.kv_heads,
                  shape.group, shape.head_dim, shape.rotary_dim, shape.bias, shape.norms,
                  shape.ctas_per_head);
    return buffer;
  }

  static constexpr float kNormEps = 1e-5f, kNormOffset = 0.5f;
  ProjectShape shape;
  std::vector<char> x, kernel, bias, query_norm, key_norm;
  std::vector<float> cos, sin;

 private:
  std::vector<char> random(size_t count, double scale) {
    std::normal_distribution<double> normal(0.0, scale);
    std::vector<char> data(count * 2);
    for (size_t i = 0; i < count; ++i) encode(shape.dtype, data.data(), i, normal(rng_));
    return data;
  }
  std::mt19937 rng_;
};

// The same in memory the GPU reads.
class DeviceProjection {
 public:
  explicit DeviceProjection(const ProjectCase& c)
      : case_(c),
        x_(c.x.size(), Placement::kDevice),
        kernel_(c.kernel.size(), Placement::kDevice),
        bias_(c.bias.size(), Placement::kDevice),
        query_norm_(c.query_norm.size(), Placement::kDevice),
        key_norm_(c.key_norm.size(), Placement::kDevice),
        cos_(4 * c.cos.size(), Placement::kDevice),
        sin_(4 * c.sin.size(), Placement::kDevice),
        query_(bytes(c.shape.kv_heads * c.shape.group), Placement::kDevice),
        key_(bytes(c.shape.kv_heads), Placement::kDevice),
        value_(bytes(c.shape.kv_heads), Placement::kDevice),
        projected_(size_t{4} * c.shape.rows * c.shape.heads(), Placement::kDevice) {
    x_.upload(c.x.data());
    kernel_.upload(c.kernel.data());
    bias_.upload(c.bias.data());
    query_norm_.upload(c.query_norm.data());
    key_norm_.upload(c.key_norm.data());
    cos_.upload(c.cos.data());
    sin_.upload(c.sin.data());
    const std::vector<int32_t> raised(static_cast<size_t>(c.shape.rows) * c.shape.heads(), 1);
    projected_.upload(raised.data());  // as an earlier call left them
    for (Buffer* b : {&query_, &key_, &value_}) {
      const std::vector<char> poison(bytes(c.shape.kv_heads * c.shape.group), '\xff');
      b->upload(poison.data(),
                bytes(b == &query_ ? c.shape.kv_heads * c.shape.group : c.shape.kv_heads));
    }
  }

  ProjectParams params() const {
    const ProjectShape& s = case_.shape;
    ProjectParams p = {};
    p.dtype = s.dtype;
    p.rows = s.rows;
    p.width = s.width;
    p.kv_heads = s.kv_heads, p.group = s.group, p.head_dim = s.head_dim;
    p.rotary_dim = s.rotary_dim;
    p.x = x_.get(), p.kernel = kernel_.get();
    if (s.bias) p.bias = bias_.get();
    if (s.norms) p.query_norm = query_norm_.get(), p.key_norm = key_norm_.get();
    p.cos = static_cast<const float*>(cos_.get()), p.sin = static_cast<const float*>(sin_.get());
    p.norm_eps = ProjectCase::kNormEps, p.norm_offset = ProjectCase::kNormOffset;
    p.query = query_.get(), p.key = key_.get(), p.value = value_.get();
    p.projected = static_cast<int32_t*>(projected_.get());
    p.ctas_per_head = s.ctas_per_head;
    return p;
  }

  // Whether every flag is raised.
  bool projected() const {
    std::vector<int32_t> flags(static_cast<size_t>(case_.shape.rows) * case_.shape.heads());
    projected_.download(flags.data());
    return std::all_of(flags.begin(), flags.end(), [](int32_t flag) { return flag == 1; });
  }

  // [rows, heads, H] in the order of the packed weights.
  std::vector<double> results() const {
    const ProjectShape& s = case_.shape;
    std::vector<char> query(bytes(s.kv_heads * s.group)), key(bytes(s.kv_heads)),
        value(bytes(s.kv_heads));
    query_.download(query.data());
    key_.download(key.data());
    value_.download(value.data());
    std::vector<double> all;
    for (int row = 0; row < s.rows; ++row)
      for (int k = 0; k < s.kv_heads; ++k)
        for (int part = 0; part < s.group + 2; ++part)
          for (int h = 0; h < s.head_dim; ++h) {
            const int64_t kv = (int64_t{row} * s.kv_heads + k) * s.head_dim + h;
            const int64_t q = ((int64_t{row} * s.kv_heads + k) * s.group + part) * s.head_dim + h;
            all.push_back(part < s.group    ? case_.at(query, q)
                          : part == s.group ? case_.at(key, kv)
                                            : case_.at(value, kv));
          }
    return all;
  }

 private:
  size_t bytes(int heads) const {
    return size_t{2} * case_.shape.rows * heads * case_.shape.head_dim;
  }

  const ProjectCase& case_;
  Buffer x_, kernel_, bias_, query_norm_, key_norm_, cos_, sin_, query_, key_, value_, projected_;
};

void check_project(const ProjectShape& shape, uint32_t seed) {
  const ProjectCase c(shape, seed);
  DeviceProjection device(c);
  CUDA_CHECK(cuda::project(device.params(), nullptr));
  CUDA_CHECK(cudaDeviceSynchronize());
  CHECK(device.projected(), "flags: %s", c.text().c_str());
  const double error = relative_error(device.results(), c.oracle());
  // One rounding of the result.
  CHECK(error < (shape.dtype == DType::kBF16 ? 2.5e-3 : 3.5e-4), "error %.3g: %s", error,
        c.text().c_str());
}

TEST(project_shapes) {
  uint32_t seed = 1;
  for (DType dtype : {DType::kBF16, DType::kF16})
    for (int head_dim : {64, 80, 96, 128, 256})
      for (int rows : {1, 9, 32}) {
        std::mt19937 rng(seed);
        ProjectShape s;
        s.dtype = dtype;
        s.rows = rows;
        s.width = quick() ? 8 * (1 + rng() % 12) : 8 * (1 + rng() % 300);
        s.kv_heads = 1 + rng() % 2;
        s.group = 1 + rng() % 4;
        s.head_dim = head_dim;
        s.rotary_dim = 2 * (rng() % (head_dim / 2 + 1));
        s.bias = rng() % 2;
        s.norms = rng() % 2;
        s.ctas_per_head = rng() % 9;
        check_project(s, seed++);
      }
}

TEST(project_any_number_of_ctas) {
  for (int ctas : {1, 2, 3, 5, 8})
    for (int width : {8, 576}) {
      ProjectShape s;
      s.rows = 5;
      s.width = width;
      s.head_dim = 128;
      s.rotary_dim = 128;
      s.norms = true;
      s.ctas_per_head = ctas;
      check_project(s, 40 + ctas);
    }
}

TEST(project_real_widths) {
  if (quick()) return;
  for (int width : {64, 576, 896, 2048, 4096, 5120})
    for (int rows : {1, 8, 17, 32}) {  // the more rows, the longer loads queue behind each other
      ProjectShape s;
      s.rows = rows;
      s.width = width;
      s.kv_heads = 2;
      s.group = 4;
      s.head_dim = 128;
      s.rotary_dim = 128;
      check_project(s, 60 + rows);
    }
}

TEST(project_refuses) {
  const ProjectCase c(ProjectShape{}, 1);
  DeviceProjection device(c);
  const auto refused = [&](auto change) {
    ProjectParams p = device.params();
    change(p);
    return cuda::project(p, nullptr) != cudaSuccess;
  };
  CHECK(refused([](ProjectParams& p) { p.rows = cuda::kMaxProjectRows + 1; }), "rows");
  CHECK(refused([](ProjectParams& p) { p.width = 12; }), "width");
  CHECK(refused([](ProjectParams& p) { p.dtype = DType::kF32; }), "dtype");
  CHECK(refused([](ProjectParams& p) { p.rotary_dim = 66; }), "rotary dim");
  CHECK(refused([](ProjectParams& p) { p.ctas_per_head = 9; }), "ctas");
  CHECK(refused([](ProjectParams& p) { p.projected = nullptr; }), "flags");
  ProjectParams p = device.params();
  p.rows = 0;
  CHECK(cuda::project(p, nullptr) == cudaSuccess, "nothing to do");
}

#if defined(DIRECTKV_EMULATE_CUDA)
// Every head of every row is there for a warp once it has waited for its flag.
void write_late(const Shape& s, const AttendParams& p) {
  const int64_t bytes = 2 * s.head_dim;
  const int parts = s.group + 2;
  for (int row = 0; row < s.batch * s.query_tokens; ++row)
    for (int k = 0; k < s.kv_heads; ++k)
      for (int part = 0; part < parts; ++part) {
        const int64_t at = int64_t{row} * s.kv_heads + k;
        const auto* const array = static_cast<const char*>(part < s.group    ? p.query
                                                           : part == s.group ? p.key
                                                                             : p.value);
        emulation::write_late(array + (part < s.group ? at * s.group + part : at) * bytes,
                              std::vector<char>(bytes, '\xff'), p.projected + at * parts + part);
      }
}
#endif

#if !defined(DIRECTKV_EMULATE_CUDA)
// Both calls in a CUDA graph, again and again: the flags are up when it begins.
template <typename Poison>
void replay(const ProjectParams& project, const AttendParams& attend, size_t query_bytes,
            size_t key_bytes, Poison poison) {
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  CUDA_CHECK(cuda::project(project, stream));
  CUDA_CHECK(cuda::attend(attend, stream));
  CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 4; ++i) {
    poison();
    CUDA_CHECK(cudaMemset(project.query, 0xff, query_bytes));
    CUDA_CHECK(cudaMemset(project.key, 0xff, key_bytes));
    CUDA_CHECK(cudaMemset(project.value, 0xff, key_bytes));
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaGraphLaunch(exec, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
  }
  CUDA_CHECK(cudaGraphExecDestroy(exec));
  CUDA_CHECK(cudaGraphDestroy(graph));
  CUDA_CHECK(cudaStreamDestroy(stream));
}
#endif

// attend behind a projection: it starts early, and reads query, key and value late.
TEST(project_then_attend) {
  for (int round = 0; round < (quick() ? 3 : 20); ++round) {
    std::mt19937 rng(100 + round);
    Shape s;
    s.dtype = rng() % 2 ? DType::kBF16 : DType::kF16;
    s.batch = 1 + rng() % 3;
    s.query_tokens = 1 + rng() % 3;
    s.kv_heads = 1 + rng() % 2;
    s.group = 1 + rng() % 4;
    s.head_dim = rng() % 2 ? 64 : 128;
    s.max_pages = 12;
    s.num_ctas = rng() % 2 ? 3 : 0;
    std::vector<int> lengths, seq;
    for (int b = 0; b < s.batch; ++b) {
      lengths.push_back(static_cast<int>(rng() % s.capacity()));
      seq.push_back(static_cast<int>(rng() % (s.query_tokens + 1)));
    }
    AttendCase attention(s, lengths, seq, round);
    ProjectShape ps;
    ps.dtype = s.dtype;
    ps.rows = s.batch * s.query_tokens;
    ps.width = 136;
    ps.kv_heads = s.kv_heads, ps.group = s.group, ps.head_dim = s.head_dim;
    ps.rotary_dim = s.head_dim;
    ps.norms = true;
    const ProjectCase projection(ps, round);
    for (Placement placement : placements()) {
      DeviceCase device(attention, placement);
      device.poison();
      const DeviceProjection weights(projection);
      AttendParams p = device.params();
      ProjectParams project = weights.params();
      project.query = const_cast<void*>(p.query);
      std::vector<char> key(attention.key.size()), value(key);
      Buffer keys(key.size(), Placement::kDevice), values(key.size(), Placement::kDevice);
      project.key = keys.get(), project.value = values.get();
      if (s.fresh) p.key = keys.get(), p.value = values.get();
      p.projected = project.projected;
      CUDA_CHECK(cuda::project(project, nullptr));
#if defined(DIRECTKV_EMULATE_CUDA)
      write_late(s, p);
#endif
      CUDA_CHECK(cuda::attend(p, nullptr));
      CUDA_CHECK(cudaDeviceSynchronize());
#if !defined(DIRECTKV_EMULATE_CUDA)
      replay(project, p, attention.query.size(), key.size(), [&] { device.poison(); });
#endif
      device.download_outputs();
      CUDA_CHECK(
          cudaMemcpy(attention.query.data(), p.query, attention.query.size(), cudaMemcpyDefault));
      keys.download(attention.key.data());
      values.download(attention.value.data());
      const OracleResult want = oracle(attention, 0, s.max_pages, true);
      const double error = relative_error(outputs(attention), want.out);
      CHECK(error <= tolerance(s.dtype), "%s error %.3g: %s", name(placement), error,
            s.text().c_str());
    }
  }
}

}  // namespace
}  // namespace directkv::test

// The vector exp and tanh (at this file's own flags) and the conversions of results.
#include <cmath>
#include <limits>

#include "../../csrc/cpu/convert.h"
#include "../../csrc/cpu/vec_math.h"
#include "check.h"
#include "scalar_types.h"

namespace directkv::test {
namespace {

template <typename Fn>
float lane0(Fn fn, float x) {
  alignas(64) float lanes[cpu::kLanes];
  cpu::store(lanes, fn(cpu::splat(x)));
  return lanes[0];
}

double ulps(float got, double want) {
  const float near = static_cast<float>(want);
  const double unit = std::nextafterf(std::fabs(near), INFINITY) - std::fabs(near);
  return std::fabs(got - want) / unit;
}

TEST(math_exp) {
  auto exp = [](float x) { return lane0([](cpu::VF v) { return cpu::exp_vec(v); }, x); };
  double worst = 0.0;
  const double step = 175.0 / share_of(1000000);
  for (double x = -87.3; x < 88.0; x += step) {
    const float f = static_cast<float>(x);
    worst = std::fmax(worst, ulps(exp(f), std::exp(static_cast<double>(f))));
  }
  CHECK(worst <= 2.0, "exp off by %.2f ulp", worst);
  CHECK(exp(0.0f) == 1.0f, "exp(0) is exact: the largest logit's weight");
  CHECK(exp(-INFINITY) == 0.0f && exp(-1e30f) == 0.0f && exp(-104.0f) == 0.0f, "underflow");
  CHECK(std::isnan(exp(NAN)), "NaN");
}

TEST(math_tanh) {
  auto tanh = [](float x) { return lane0([](cpu::VF v) { return cpu::tanh_vec(v); }, x); };
  double worst = 0.0;
  const double step = 24.0 / share_of(200000);
  for (double x = -12.0; x < 12.0; x += step) {
    const float f = static_cast<float>(x);
    worst = std::fmax(worst, ulps(tanh(f), std::tanh(static_cast<double>(f))));
  }
  CHECK(worst <= 3.0, "tanh off by %.2f ulp", worst);
  CHECK(tanh(1e-20f) == 1e-20f && tanh(INFINITY) == 1.0f && tanh(-INFINITY) == -1.0f, "limits");
  CHECK(std::isnan(tanh(NAN)), "NaN");
}

// Every 16-bit pattern survives widening and narrowing; midpoints go to even.
TEST(math_conversions) {
  for (DType dtype : {DType::kBF16, DType::kF16}) {
    auto narrow = [&](double x) {
      const float f = static_cast<float>(x);
      return dtype == DType::kBF16 ? cpu::to_bf16(f) : cpu::to_f16(f);
    };
    for (int i = 0; i < 0x10000; ++i) {
      const uint16_t h = static_cast<uint16_t>(i), above = static_cast<uint16_t>(i + 1);
      const double x = decode16(dtype, h);
      if (std::isnan(x)) {
        CHECK(std::isnan(decode16(dtype, narrow(x))), "NaN %04x", i);
        continue;
      }
      CHECK(narrow(x) == h, "%04x", i);
      const double next = decode16(dtype, above);
      if (!std::isfinite(next) || i == 0x7fff || i == 0xffff) continue;
      CHECK(narrow((x + next) / 2) == (h & 1 ? above : h), "midpoint above %04x", i);
    }
  }
  CHECK(cpu::to_f16(65520.0f) == 0x7c00 && cpu::to_f16(65519.0f) == 0x7bff, "f16 overflow");
}

}  // namespace
}  // namespace directkv::test

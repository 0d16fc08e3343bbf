// Squared norms of lines.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/cpu/lines.h"
#include "lines_levels.h"

namespace torchkv {
namespace {

using testing::levels;
using testing::LineCall;

// fp64 gradients of a fp32 value are seen as fp32 ones.
TEST(LineNormTest, InTheArithmeticOfTheStoredValue) {
  const std::array<double, 2> gradient{1e100, 3};
  const std::array<const char*, 1> values{
      reinterpret_cast<const char*>(gradient.data())};
  RuleStep step;
  step.rule.id = RuleSpec::Id::kSgd;
  for (const auto& level : levels()) {
    const std::array<c10::ScalarType, 1> dtypes{at::kDouble};
    double norm = 0;
    LineCall call;
    call.what = LineCall::What::kSquaredNorm;
    call.step = step;
    call.dtypes = dtypes.data();
    call.num_values = 1;
    call.values = values.data();
    call.accumulation = at::kDouble;
    call.num_elements = 2;
    call.norms = &norm;
    level.function(call);
    EXPECT_EQ(norm, INFINITY) << level.name;
    call.stored_dtype = at::kDouble;
    level.function(call);
    EXPECT_DOUBLE_EQ(norm, 1e200) << level.name;
  }
}

} // namespace
} // namespace torchkv

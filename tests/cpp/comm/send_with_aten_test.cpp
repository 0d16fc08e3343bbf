// What codecs send by PyTorch's operators: the bits of the CPU's kernels.
#include "comm/send_with_aten.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>

#include "core/plain_dispatch.h"
#include "kernels/cpu/compressed_sums.h"
#include "kernels/cpu/select_top.h"

namespace torchkv {
namespace {

using Id = Codec::Id;

class SendWithAtenTest : public ::testing::TestWithParam<Id> {
 protected:
  static constexpr uint64_t kStream = 0xFEDCBA9876543210U;

  static Codec codec() {
    Codec codec;
    codec.id = GetParam();
    codec.threshold = 0.3;
    codec.ratio = 0.1;
    return codec;
  }

  // Of the kernels.
  static SentWithAten expected(
      const at::Tensor& value,
      const at::Tensor& residual,
      c10::ScalarType dtype) {
    kernels::cpu::CompressedSource source;
    source.data = static_cast<const char*>(value.const_data_ptr());
    source.dtype = value.scalar_type();
    source.codec = codec();
    source.stream = kStream;
    SentWithAten result{at::empty(value.sizes(), dtype), {}};
    if (residual.defined()) {
      result.residual = residual.clone();
      source.residual = static_cast<char*>(result.residual.mutable_data_ptr());
    }
    if (source.codec.id == Id::kTopK) {
      const auto top = kernels::cpu::select_top(
          source.data,
          source.dtype,
          source.residual,
          dtype,
          value.numel(),
          source.codec.num_sent(value.numel()));
      source.least_bits = top.least_bits;
      source.ties_end = top.ties_end;
    }
    kernels::cpu::CompressedSumBatch batch;
    batch.add({source, 0, result.sent, dtype});
    batch.run();
    return result;
  }

  // NaN has many bits.
  static void expect_same(
      const at::Tensor& actual,
      const at::Tensor& expected,
      const char* what) {
    ASSERT_EQ(actual.defined(), expected.defined());
    if (!expected.defined()) {
      return;
    }
    const at::Tensor same = actual.isnan()
                                .logical_and(expected.isnan())
                                .logical_or(actual.eq(expected));
    EXPECT_TRUE(same.all().item<bool>())
        << what << ' ' << (~same).sum().item<int64_t>() << " differ, the first "
        << actual.index({~same})[0].item<double>() << " instead of "
        << expected.index({~same})[0].item<double>();
  }

  static void check(const at::Tensor& value, c10::ScalarType dtype) {
    const PlainDispatch plain;
    const at::Tensor residual = codec().has_feedback()
        ? at::randn(value.sizes(), dtype).mul_(0.25)
        : at::Tensor();
    const at::Tensor kept = residual.defined() ? residual.clone() : residual;
    const at::Tensor given = value.clone();
    const SentWithAten actual =
        send_with_aten(codec(), value, residual, dtype, kStream);
    const SentWithAten wanted = expected(value, residual, dtype);
    EXPECT_EQ(actual.sent.scalar_type(), dtype);
    expect_same(actual.sent, wanted.sent, "sent");
    expect_same(actual.residual, wanted.residual, "residual");
    expect_same(value, given, "the value");
    if (residual.defined()) {
      EXPECT_TRUE(at::equal(residual, kept));
    }
  }
};

TEST_P(SendWithAtenTest, HasTheBitsOfTheKernels) {
  at::manual_seed(0);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto of_value :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const int64_t size : {1, 127, 1024, 5000}) {
        check(at::randn({size}, at::kDouble).to(of_value), dtype);
      }
    }
  }
}

TEST_P(SendWithAtenTest, AlsoOfExtremeNumbers) {
  at::manual_seed(0);
  using Limits = std::numeric_limits<float>;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    // All magnitudes, from subnormal numbers on.
    const at::Tensor magnitudes =
        at::randn({5000}, at::kDouble)
            .mul_(at::pow(10, at::randint(-46, 39, {5000}).to(at::kDouble)));
    check(magnitudes.to(at::kFloat), dtype);
    check(at::zeros({300}), dtype);
    check(at::full({300}, 1e-44F), dtype);
    at::Tensor infinite = at::randn({3000});
    infinite.slice(0, 100, 3000, 371).fill_(Limits::infinity());
    infinite.slice(0, 200, 3000, 371).fill_(-Limits::infinity());
    infinite.slice(0, 300, 3000, 371).fill_(Limits::quiet_NaN());
    check(infinite, dtype);
    check(at::randint(-3, 3, {3000}).to(at::kFloat), dtype); // ties
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs,
    SendWithAtenTest,
    ::testing::Values(
        Id::k1Bit,
        Id::k2Bit,
        Id::kFp16,
        Id::kBf16,
        Id::kFp8,
        Id::kInt4,
        Id::kTopK),
    [](const auto& param) {
      Codec codec;
      codec.id = param.param;
      return std::string("of_") + name_of(codec);
    });

} // namespace
} // namespace torchkv

// What codecs send by PyTorch's operators: the bits of the CPU's kernels.
#include "comm/send_with_aten.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "core/plain_dispatch.h"
#include "sent_helpers.h"

namespace torchkv {
namespace {

using Id = Codec::Id;
using namespace testing; // NOLINT: all of it

class SendWithAtenTest : public ::testing::TestWithParam<Id> {
 protected:
  static void check(const at::Tensor& value, c10::ScalarType dtype) {
    const PlainDispatch plain;
    const Codec codec = sent_codec(GetParam());
    const at::Tensor residual = codec.has_feedback()
        ? at::randn(value.sizes(), dtype).mul_(0.25)
        : at::Tensor();
    const at::Tensor kept = residual.defined() ? residual.clone() : residual;
    const at::Tensor given = value.clone();
    const Sent actual =
        send_with_aten(codec, value, residual, dtype, kSentStream);
    const Sent expected = expected_sent(codec, value, residual, dtype);
    expect_same_numbers(actual.sent, expected.sent, "sent");
    expect_same_numbers(actual.residual, expected.residual, "residual");
    expect_same_numbers(value, given, "the value");
    expect_same_numbers(residual, kept, "the residual before");
  }
};

TEST_P(SendWithAtenTest, HasTheBitsOfTheKernels) {
  check_numbers(&check);
}

TEST_P(SendWithAtenTest, AlsoOfExtremeNumbers) {
  check_extreme_numbers(&check);
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
    name_of_codec);

} // namespace
} // namespace torchkv

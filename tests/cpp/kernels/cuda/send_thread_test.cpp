// What the CUDA kernels send, run on the host: the bits of the CPU's kernels.
#include "kernels/cuda/send_thread.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "emulated_table.h"
#include "sent_helpers.h"

namespace torchkv {
namespace {

using Id = Codec::Id;
using namespace testing; // NOLINT: all of it

kernels::cuda::Dtype dtype_of(const at::Tensor& value) {
  using kernels::cuda::Dtype;
  return value.scalar_type() == at::kDouble ? Dtype::kDouble
      : value.scalar_type() == at::kFloat   ? Dtype::kFloat
      : value.scalar_type() == at::kHalf    ? Dtype::kHalf
                                            : Dtype::kBFloat16;
}

class CudaSendTest : public ::testing::TestWithParam<Id> {
 protected:
  // With tensors that begin `offset` elements behind an aligned address.
  static void check_at(int64_t offset, const at::Tensor& given) {
    const auto dtype =
        given.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t size = given.numel();
    const auto padded = [&](c10::ScalarType type) {
      return at::full({size + offset + 1}, 77, type);
    };
    const at::Tensor values = padded(given.scalar_type());
    const at::Tensor value = values.narrow(0, offset, size).copy_(given);
    const Codec codec = sent_codec(GetParam());
    const at::Tensor residual = codec.has_feedback()
        ? padded(dtype).narrow(0, offset, size).normal_().mul_(0.25)
        : at::Tensor();
    const Sent expected = expected_sent(codec, value, residual, dtype);
    const at::Tensor sent = padded(dtype);
    const at::Tensor kept = padded(dtype);
    kernels::cuda::Send call{};
    call.value = dtype_of(value);
    call.codec = codec.id;
    call.is_aligned = offset == 0;
    call.threshold = codec.threshold;
    call.stream = kSentStream;
    call.num_elements = size;
    call.values = value.const_data_ptr();
    const auto begin = [&](const at::Tensor& tensor) {
      return tensor.narrow(0, offset, size).mutable_data_ptr();
    };
    call.sent = begin(sent);
    if (residual.defined()) {
      call.residual = residual.const_data_ptr();
      call.kept = begin(kept);
    }
    EXPECT_EQ(emulated_table().launch_send(call, nullptr), 0);
    expect_same_numbers(sent.narrow(0, offset, size), expected.sent, "sent");
    if (residual.defined()) {
      expect_same_numbers(
          kept.narrow(0, offset, size), expected.residual, "residual");
    }
    expect_same_numbers(value, given, "the value");
    // Nothing else has been written.
    for (const auto& tensor : {sent, kept}) {
      EXPECT_EQ(tensor[size + offset].item<double>(), 77);
      EXPECT_TRUE(offset == 0 || tensor[0].item<double>() == 77);
    }
  }

  static void check(const at::Tensor& value, c10::ScalarType dtype) {
    const bool is_double = value.scalar_type() == at::kDouble;
    if (is_double == (dtype == at::kDouble)) {
      check_at(0, value);
      check_at(1, value);
    }
  }
};

TEST_P(CudaSendTest, HasTheBitsOfTheCpu) {
  check_numbers(&check);
}

TEST_P(CudaSendTest, AlsoOfExtremeNumbers) {
  check_extreme_numbers([](const at::Tensor& value, c10::ScalarType dtype) {
    const bool is_half = c10::isReducedFloatingType(value.scalar_type());
    check(is_half ? value : value.to(dtype), dtype);
  });
}

INSTANTIATE_TEST_SUITE_P(
    Codecs,
    CudaSendTest,
    ::testing::Values(
        Id::k1Bit,
        Id::k2Bit,
        Id::kFp16,
        Id::kBf16,
        Id::kFp8,
        Id::kInt4),
    name_of_codec);

} // namespace
} // namespace torchkv

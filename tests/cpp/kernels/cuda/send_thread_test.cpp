// What the CUDA kernels send, run on the host: the bits of the CPU's kernels.
#include "kernels/cuda/send_thread.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

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
  // Several values with tensors that begin `offset` elements behind an aligned
  // address, in launches of `per_launch` values.
  static void check_at(
      int64_t offset,
      const std::vector<at::Tensor>& given,
      size_t per_launch) {
    const auto dtype =
        given[0].scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    const int64_t size = given[0].numel();
    std::vector<at::Tensor> written; // with a number before and behind
    const auto padded = [&](c10::ScalarType type) {
      written.push_back(at::full({size + offset + 1}, 77, type));
      return written.back().narrow(0, offset, size);
    };
    const Codec codec = sent_codec(GetParam());
    std::vector<ToSend> values;
    std::vector<at::Tensor> kept;
    for (const auto& numbers : given) {
      ToSend& value = values.emplace_back();
      value.value = padded(numbers.scalar_type()).copy_(numbers);
      value.stream = kSentStream + values.size();
      if (codec.has_feedback()) {
        value.residual = padded(dtype).normal_().mul_(0.25);
        kept.push_back(padded(dtype));
      }
    }
    const at::Tensor sum = padded(dtype);
    const SentSum expected = expected_sum(codec, values, dtype);
    for (size_t first = 0; first < values.size(); first += per_launch) {
      kernels::cuda::Send call{};
      call.value = dtype_of(given[0]);
      call.codec = codec.id;
      call.is_aligned = offset == 0;
      call.adds = first != 0;
      call.threshold = codec.threshold;
      call.num_elements = size;
      call.sum = sum.mutable_data_ptr();
      for (size_t i = first; i < values.size() && i < first + per_launch; ++i) {
        auto& sent = call.values[call.num_values++];
        sent.values = values[i].value.const_data_ptr();
        sent.stream = values[i].stream;
        if (codec.has_feedback()) {
          sent.residual = values[i].residual.const_data_ptr();
          sent.kept = kept[i].mutable_data_ptr();
        }
      }
      std::vector<kernels::cuda::TopState> tops(kernels::cuda::kMaxSent);
      if (codec.id == Id::kTopK) {
        select_top(codec, call, tops);
      }
      EXPECT_EQ(emulated_table().launch_send(call, nullptr), 0);
    }
    expect_same_numbers(sum, expected.sum, "the sum");
    for (size_t i = 0; i < values.size(); ++i) {
      if (codec.has_feedback()) {
        expect_same_numbers(kept[i], expected.residuals[i], "a residual");
      }
      expect_same_numbers(values[i].value, given[i], "a value");
    }
    for (const auto& tensor : written) {
      EXPECT_EQ(tensor[size + offset].item<double>(), 77);
      EXPECT_TRUE(offset == 0 || tensor[0].item<double>() == 77);
    }
  }

  static void select_top(
      const Codec& codec,
      kernels::cuda::Send& send,
      std::vector<kernels::cuda::TopState>& tops) {
    kernels::cuda::SelectTop call{};
    call.value = send.value;
    call.is_aligned = send.is_aligned;
    call.num_values = send.num_values;
    call.num_elements = send.num_elements;
    call.num_sent = codec.num_sent(send.num_elements);
    for (uint32_t k = 0; k < send.num_values; ++k) {
      send.values[k].top = &tops[k];
      call.values[k] = {
          send.values[k].values, send.values[k].residual, &tops[k]};
    }
    EXPECT_EQ(emulated_table().launch_select_top(call, nullptr), 0);
  }

  static void check(const at::Tensor& value, c10::ScalarType dtype) {
    const bool is_double = value.scalar_type() == at::kDouble;
    if (is_double == (dtype == at::kDouble)) {
      check_at(0, {value}, 1);
      const std::vector<at::Tensor> three{value, value.flip(0), value.neg()};
      check_at(0, three, kernels::cuda::kMaxSent);
      check_at(1, three, 2);
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
        Id::kInt4,
        Id::kTopK),
    name_of_codec);

} // namespace
} // namespace torchkv

// The codes that the CUDA kernels send, and their sums, run on the host: the
// bits of the CPU's kernels.
#include "kernels/cuda/receive_thread.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "comm/cuda_dtype.h"
#include "emulated_table.h"
#include "kernels/cuda/code_chunk.h"
#include "sent_helpers.h"

namespace torchkv {
namespace {

using Id = Codec::Id;
using namespace testing; // NOLINT: all of it

class CudaReceiveTest : public ::testing::TestWithParam<Id> {
 protected:
  // The codes of these values by one launch, and what is sent of each.
  static std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> send(
      const std::vector<at::Tensor>& values,
      c10::ScalarType dtype) {
    const Codec codec = sent_codec(GetParam());
    const int64_t size = values[0].numel();
    const int64_t num_bytes = kernels::cuda::bytes_of_codes(
        codec.id, static_cast<int64_t>(c10::elementSize(dtype)), size);
    kernels::cuda::Send call{};
    call.value = cuda_dtype(values[0].scalar_type()).value();
    call.codec = codec.id;
    call.is_aligned = true;
    call.packs = true;
    call.threshold = codec.threshold;
    call.num_elements = size;
    std::vector<at::Tensor> codes;
    std::vector<at::Tensor> kept;
    std::vector<at::Tensor> residuals;
    std::vector<Sent> expected;
    for (const auto& value : values) {
      at::Tensor& residual = residuals.emplace_back();
      auto& sent = call.values[call.num_values++];
      sent = {};
      sent.values = value.const_data_ptr();
      sent.stream = kSentStream;
      if (codec.has_feedback()) {
        residual = at::randn({size}, dtype).mul_(0.25);
        kept.push_back(at::empty({size}, dtype));
        sent.residual = residual.const_data_ptr();
        sent.kept = kept.back().mutable_data_ptr();
      }
      // With a guard behind it.
      codes.push_back(at::full({num_bytes + 16}, 77, at::kByte));
      sent.codes = codes.back().mutable_data_ptr();
      expected.push_back(expected_sent(codec, value, residual, dtype));
    }
    EXPECT_EQ(emulated_table().launch_send(call, nullptr), 0);
    std::vector<at::Tensor> numbers;
    for (size_t i = 0; i < values.size(); ++i) {
      if (codec.has_feedback()) {
        expect_same_numbers(kept[i], expected[i].residual, "a residual");
      }
      EXPECT_TRUE(codes[i].narrow(0, num_bytes, 16).eq(77).all().item<bool>());
      numbers.push_back(expected[i].sent);
    }
    return {codes, numbers};
  }

  // Sums of the elements from `begin` on, with dense values after the codes of
  // every second one, in launches of `per_launch` values.
  static void receive(
      const std::vector<at::Tensor>& codes,
      const std::vector<at::Tensor>& sent,
      int64_t begin,
      int64_t end,
      uint32_t per_launch) {
    const Codec codec = sent_codec(GetParam());
    const c10::ScalarType dtype = sent[0].scalar_type();
    const int64_t bytes = kernels::cuda::bytes_of_chunk(
        codec.id, static_cast<int64_t>(c10::elementSize(dtype)));
    const int64_t size = end - begin;
    const at::Tensor dense = at::randn({size}, dtype);
    const at::Tensor sum = at::full({size + 1}, 77, dtype);
    at::Tensor expected;
    std::vector<kernels::cuda::ReceivedValue> values;
    const auto add = [&](const void* memory, const at::Tensor& numbers) {
      values.push_back({memory, memory == dense.const_data_ptr()});
      expected = expected.defined() ? expected + numbers : numbers;
    };
    for (size_t i = 0; i < codes.size(); ++i) {
      add(static_cast<const char*>(codes[i].const_data_ptr()) +
              begin / kernels::cuda::kSendChunk * bytes,
          sent[i].slice(0, begin, end));
      if (i % 2 == 1) {
        add(dense.const_data_ptr(), dense);
      }
    }
    for (size_t next = 0; next < values.size();) {
      kernels::cuda::Receive call{};
      call.number = cuda_dtype(dtype).value();
      call.codec = codec.id;
      call.adds = next != 0;
      call.threshold = codec.threshold;
      call.first = begin % kernels::cuda::kSendChunk;
      call.is_aligned = call.first % kernels::cuda::kSendPack == 0;
      call.num_elements = size;
      call.sum = sum.mutable_data_ptr();
      while (call.num_values < per_launch && next < values.size()) {
        call.values[call.num_values++] = values[next++];
      }
      EXPECT_EQ(emulated_table().launch_receive(call, nullptr), 0);
    }
    expect_same_numbers(sum.narrow(0, 0, size), expected, "the sum");
    EXPECT_EQ(sum[size].item<double>(), 77);
  }

  static void check(const at::Tensor& value, c10::ScalarType dtype) {
    const bool is_double = value.scalar_type() == at::kDouble;
    if (is_double != (dtype == at::kDouble)) {
      return;
    }
    const auto [codes, sent] = send({value, value.flip(0), value.neg()}, dtype);
    const int64_t size = value.numel();
    receive(codes, sent, 0, size, kernels::cuda::kMaxSent);
    receive(codes, sent, size / 2 / 4 * 4, size, 3);
    receive(codes, sent, size / 3, std::max(size - 1, size / 3 + 1), 1);
    receive(codes, sent, size - 1, size, 2);
  }
};

TEST_P(CudaReceiveTest, AddsUpWhatTheCpuSends) {
  check_numbers(&check);
}

TEST_P(CudaReceiveTest, AlsoOfExtremeNumbers) {
  check_extreme_numbers([](const at::Tensor& value, c10::ScalarType dtype) {
    const bool is_half = c10::isReducedFloatingType(value.scalar_type());
    check(is_half ? value : value.to(dtype), dtype);
  });
}

TEST_P(CudaReceiveTest, CodesAreSmall) {
  const auto bytes = static_cast<double>(
      kernels::cuda::bytes_of_codes(GetParam(), sizeof(float), 1 << 20));
  const double bits = bytes * 8 / (1 << 20);
  const Id id = GetParam();
  EXPECT_LE(
      bits,
      id == Id::k1Bit || id == Id::k2Bit ? 2
          : id == Id::kInt4              ? 4.25
          : id == Id::kFp8               ? 8.125
                                         : 16);
}

INSTANTIATE_TEST_SUITE_P(
    Codecs,
    CudaReceiveTest,
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

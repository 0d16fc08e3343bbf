// Operators on fake devices match the CPU.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <vector>

#include "devices_test.h"

namespace torchkv::mock_cuda {
namespace {

using OperatorsTest = DevicesTest;

at::Tensor numbers(c10::Device device) {
  return at::arange(24, at::kFloat).view({4, 6}).to(device);
}

// Expects the same result of the call on the CPU and on a device.
template <class Call>
void expect_as_on_the_cpu(Call call) {
  const at::Tensor expected = call(c10::Device(c10::kCPU));
  const at::Tensor result = call(cuda(1));
  EXPECT_EQ(result.device(), cuda(1));
  EXPECT_EQ(result.strides(), expected.strides());
  EXPECT_TRUE(at::equal(result.cpu(), expected)) << result << expected;
}

TEST_F(OperatorsTest, Functions) {
  expect_as_on_the_cpu([](auto device) {
    const at::Tensor x = numbers(device);
    return at::where(x.gt(3), x, x.sign()).sum(0);
  });
  expect_as_on_the_cpu([](auto device) { return numbers(device).norm(); });
  expect_as_on_the_cpu([](auto device) {
    return at::stack({numbers(device), numbers(device)});
  });
}

TEST_F(OperatorsTest, InPlaceAndOut) {
  expect_as_on_the_cpu([](auto device) {
    at::Tensor x = numbers(device);
    x.mul_(2).addcmul_(x, x, 0.5).lerp_(numbers(device), 0.25).clamp_(1, 9);
    at::maximum_out(x, x, at::ones_like(x));
    at::_foreach_add_(x, 1);
    return x;
  });
  expect_as_on_the_cpu([](auto device) {
    at::Tensor out = at::empty(0, device);
    at::mul_out(out, numbers(device), numbers(device));
    return at::logical_and(out, numbers(device)); // resizes its out
  });
  expect_as_on_the_cpu([](auto device) {
    at::Tensor x = numbers(device);
    const auto row = at::ones(1, at::kLong).to(device);
    return x.index_put_({row}, at::zeros({1, 6}, device));
  });
}

TEST_F(OperatorsTest, ViewsShareMemory) {
  expect_as_on_the_cpu([](auto device) {
    const at::Tensor x = numbers(device);
    x.select(0, 1).fill_(7);
    x.slice(1, 2, 5, 2).add_(1);
    x.view({6, 4}).t()[3].zero_();
    return x;
  });
  expect_as_on_the_cpu([](auto device) {
    const at::Tensor x =
        at::zeros(3, at::device(device).dtype(at::kComplexFloat));
    at::view_as_real(x).select(1, 1).fill_(3);
    return x.conj();
  });
}

TEST_F(OperatorsTest, FormatsAndDtypes) {
  expect_as_on_the_cpu([](auto device) {
    return numbers(device)
        .view({1, 2, 3, 4})
        .to(at::kHalf)
        .contiguous(at::MemoryFormat::ChannelsLast);
  });
  expect_as_on_the_cpu([](auto device) {
    return numbers(device).expand({2, 4, 6}).to(at::kDouble);
  });
}

class CopiesTest : public DevicesTest,
                   public ::testing::WithParamInterface<Topology> {
 protected:
  CopiesTest() {
    reset(4, GetParam());
  }
};

// Through the temporaries that a copy without peer access needs.
TEST_P(CopiesTest, ConvertAndPermute) {
  const at::Tensor source = numbers(cuda(0)).t();
  const at::Tensor expected = numbers(c10::kCPU).t().to(at::kHalf);
  const at::Tensor out =
      at::empty({6, 4}, at::device(cuda(2)).dtype(at::kHalf));
  out.copy_(source);
  EXPECT_TRUE(at::equal(out.cpu(), expected));
  EXPECT_TRUE(at::equal(source.to(cuda(3), at::kHalf).cpu(), expected));
  EXPECT_TRUE(at::equal(source.cpu(), expected.to(at::kFloat)));
  const at::Tensor on_cpu = at::empty({6, 4}, at::kHalf);
  on_cpu.copy_(source);
  EXPECT_TRUE(at::equal(on_cpu, expected));
}

INSTANTIATE_TEST_SUITE_P(
    AllTopologies,
    CopiesTest,
    ::testing::Values(Topology::kAll, Topology::kPairs, Topology::kNone));

TEST_F(OperatorsTest, AllocateOnTheCurrentStreamOfTheirDevice) {
  const at::Tensor x = at::empty(1, cuda(2));
  EXPECT_EQ(x.device(), cuda(2));
  EXPECT_EQ(current_device(), cuda(0));
  const c10::StreamGuard guard(new_stream(cuda(2)));
  EXPECT_EQ(refusal([&] { at::zeros(4, cuda(2)).add_(1); }), "");
}

} // namespace
} // namespace torchkv::mock_cuda

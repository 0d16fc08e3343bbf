// Stores of several processes cannot be captured into CUDA graphs.
#include "dist/capture.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <string>

#include "device/runtime.h"
#include "devices_test.h"
#include "graph.h"

namespace torchkv::dist {
namespace {

using mock_cuda::begin_capture;
using mock_cuda::cuda;
using mock_cuda::end_capture;
using mock_cuda::new_stream;
using mock_cuda::refusal;

using DistCaptureTest = mock_cuda::DevicesTest;

TEST_F(DistCaptureTest, CallsWithTensorsOfACapturedDeviceAreRefused) {
  const Keys keys(1);
  const Tensors values(at::ones({5}, at::device(cuda(0))));
  const Tensors on_cpu(at::ones({5}));
  const auto check = [&](const Tensors* in, const Tensors* out) {
    return refusal([&] {
      check_not_capturing({"pushpull", keys, in, out}, default_runtime());
    });
  };
  EXPECT_EQ(check(&values, &values), "");
  const c10::Stream stream = new_stream(cuda(0));
  mock_cuda::order(mock_cuda::current_stream(cuda(0)), stream);
  const c10::StreamGuard guard(stream);
  begin_capture(stream);
  const std::string as_value = check(&values, nullptr);
  const std::string as_out = check(&on_cpu, &values);
  const std::string neither = check(&on_cpu, &on_cpu);
  end_capture(stream);
  for (const auto& message : {as_value, as_out}) {
    EXPECT_NE(
        message.find("pushpull: a call on a store of several processes cannot"),
        std::string::npos)
        << message;
  }
  EXPECT_EQ(neither, "");
  EXPECT_EQ(check(&values, &values), "");
}

} // namespace
} // namespace torchkv::dist

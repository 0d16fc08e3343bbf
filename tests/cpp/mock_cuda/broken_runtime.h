#pragma once

#include <gtest/gtest.h>

#include <string>

#include "devices_test.h"
#include "wrapped_runtime.h"

namespace torchkv::mock_cuda {

// The default runtime with defects, which the checker must detect.
class BrokenRuntime final : public testing::WrappedRuntime {
 public:
  bool is_capturing(c10::Stream stream) override {
    return sees_captures && WrappedRuntime::is_capturing(stream);
  }
  void wait(RuntimeEvent& event, c10::Stream stream) override {
    if (waits) {
      WrappedRuntime::wait(event, stream);
    }
  }
  void keep_until_done(const at::Tensor& tensor, c10::Stream stream) override {
    if (keeps) {
      WrappedRuntime::keep_until_done(tensor, stream);
    }
  }

  bool sees_captures = true;
  bool waits = true;
  bool keeps = true;
};

// Expects no error of the call, but one if streams do not wait.
template <class Call>
void expect_waits_matter(Call call) {
  BrokenRuntime runtime;
  EXPECT_EQ(refusal([&] { call(runtime); }), "");
  runtime.waits = false;
  EXPECT_NE(
      refusal([&] { call(runtime); }).find("nothing orders the two"),
      std::string::npos);
  refusal([] {}); // reports errors of freed tensors
}

} // namespace torchkv::mock_cuda

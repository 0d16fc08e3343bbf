#pragma once

#include <gtest/gtest.h>

#include <string>

#include "devices_test.h"
#include "wrapped_runtime.h"

namespace torchkv::mock_cuda {

// The real runtime, less what a test takes away: the checker must see it.
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

// The checker finds no mistake in the call, but one where streams do not wait.
template <class Call>
void expect_waits_matter(Call call) {
  BrokenRuntime runtime;
  EXPECT_EQ(refusal([&] { call(runtime); }), "");
  runtime.waits = false;
  EXPECT_NE(
      refusal([&] { call(runtime); }).find("nothing orders the two"),
      std::string::npos);
  refusal([] {}); // what was found when tensors were freed
}

} // namespace torchkv::mock_cuda

#pragma once

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

} // namespace torchkv::mock_cuda

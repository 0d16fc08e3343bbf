#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime.h"

namespace torchkv::testing {

// A Runtime without devices: streams are numbers that the test sets, memory is
// the CPU's, and what was asked for is written down.
class RecordingRuntime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return c10::Stream(c10::Stream::UNSAFE, device, stream);
  }
  void record(std::unique_ptr<RuntimeEvent>& event, c10::Stream stream)
      override {
    if (event == nullptr) {
      event = std::make_unique<RuntimeEvent>();
    }
    log.push_back("record " + std::to_string(stream.id()));
  }
  void wait(RuntimeEvent& /*event*/, c10::Stream stream) override {
    log.push_back("wait " + std::to_string(stream.id()));
  }
  void keep_until_done(const at::Tensor& /*tensor*/, c10::Stream stream)
      override {
    log.push_back("keep " + std::to_string(stream.id()));
  }
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device /*device*/) override {
    return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype));
  }
  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    if (on_copy) {
      on_copy();
    }
    destination.copy_(source);
  }

  int64_t stream = 0;
  std::vector<std::string> log;
  std::function<void()> on_copy;
};

} // namespace torchkv::testing

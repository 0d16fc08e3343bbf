#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/runtime.h"

namespace torchkv::testing {

// A Runtime without devices: streams are numbers that the test sets, memory is
// the CPU's, and calls are recorded.
class RecordingRuntime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return c10::Stream(c10::Stream::UNSAFE, device, stream);
  }
  c10::Stream new_stream(c10::Device device) override {
    return c10::Stream(c10::Stream::UNSAFE, device, 100 + num_streams++);
  }
  c10::Stream exchange_stream(c10::Stream next) override {
    const c10::Stream before = current_stream(next.device());
    stream = next.id();
    return before;
  }
  bool is_capturing(c10::Stream /*stream*/) override {
    return capturing;
  }
  std::unique_ptr<RuntimeEvent> make_event(c10::Device /*device*/) override {
    ++num_events;
    return std::make_unique<RuntimeEvent>();
  }
  void record(RuntimeEvent& /*event*/, c10::Stream stream) override {
    log.push_back("record " + name_of(stream));
  }
  void wait(RuntimeEvent& /*event*/, c10::Stream stream) override {
    log.push_back("wait " + name_of(stream));
  }
  bool is_done(RuntimeEvent& /*event*/) override {
    return done;
  }
  void synchronize(RuntimeEvent& /*event*/) override {
    log.emplace_back("synchronize");
  }
  void keep_until_done(const at::Tensor& /*tensor*/, c10::Stream stream)
      override {
    log.push_back("keep " + name_of(stream));
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
  at::Tensor allocate_on_host(
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device /*device*/) override {
    return at::empty(sizes, dtype);
  }
  std::shared_ptr<void> pin(
      void* /*data*/,
      size_t /*size*/,
      c10::Device /*device*/) override {
    return nullptr;
  }
  void copy_pinned(const at::Tensor& destination, const at::Tensor& source)
      override {
    log.emplace_back("copy pinned");
    destination.copy_(source);
  }

  // "1", or "1 of 3" on device 3.
  static std::string name_of(c10::Stream stream) {
    const auto device = stream.device_index();
    return std::to_string(stream.id()) +
        (device <= 0 ? "" : " of " + std::to_string(device));
  }

  int64_t stream = 0;
  bool capturing = false;
  bool done = false; // every event
  int num_events = 0; // created
  int num_streams = 0; // likewise; from 100
  std::vector<std::string> log;
  std::function<void()> on_copy;
};

} // namespace torchkv::testing

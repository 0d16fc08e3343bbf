#pragma once

#include <memory>

#include "device/runtime.h"

namespace torchkv::testing {

// The default runtime, for tests that change a part of it.
class WrappedRuntime : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return real_.current_stream(device);
  }
  c10::Stream new_stream(c10::Device device) override {
    return real_.new_stream(device);
  }
  c10::Stream exchange_stream(c10::Stream stream) override {
    return real_.exchange_stream(stream);
  }
  bool is_capturing(c10::Stream stream) override {
    return real_.is_capturing(stream);
  }
  std::unique_ptr<RuntimeEvent> make_event(c10::Device device) override {
    return real_.make_event(device);
  }
  void record(RuntimeEvent& event, c10::Stream stream) override {
    real_.record(event, stream);
  }
  void wait(RuntimeEvent& event, c10::Stream stream) override {
    real_.wait(event, stream);
  }
  bool is_done(RuntimeEvent& event) override {
    return real_.is_done(event);
  }
  void synchronize(RuntimeEvent& event) override {
    real_.synchronize(event);
  }
  void keep_until_done(const at::Tensor& tensor, c10::Stream stream) override {
    real_.keep_until_done(tensor, stream);
  }
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    return real_.allocate(sizes, strides, dtype, device);
  }
  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    real_.copy(destination, source);
  }
  at::Tensor allocate_on_host(
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device device) override {
    return real_.allocate_on_host(sizes, dtype, device);
  }
  std::shared_ptr<void> pin(void* data, size_t size, c10::Device device)
      override {
    return real_.pin(data, size, device);
  }
  void copy_pinned(const at::Tensor& destination, const at::Tensor& source)
      override {
    real_.copy_pinned(destination, source);
  }

 private:
  Runtime& real_ = default_runtime();
};

} // namespace torchkv::testing

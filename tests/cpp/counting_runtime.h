#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "runtime.h"

namespace torchkv::testing {

// The real runtime, with memory that is counted and can run out.
class CountingRuntime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return real_.current_stream(device);
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
  void keep_until_done(const at::Tensor& tensor, c10::Stream stream) override {
    real_.keep_until_done(tensor, stream);
  }
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    TORCH_CHECK(num_left-- > 0, "no memory");
    at::Tensor result = real_.allocate(sizes, strides, dtype, device);
    bytes += static_cast<int64_t>(result.nbytes());
    tensors_.emplace_back(result.getIntrusivePtr());
    return result;
  }
  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    real_.copy(destination, source);
  }

  // Of the tensors that were allocated.
  size_t num_alive() const {
    size_t count = 0;
    for (const auto& tensor : tensors_) {
      count += tensor.expired() ? 0 : 1;
    }
    return count;
  }

  int64_t bytes = 0; // that were allocated
  int64_t num_left = 1 << 30; // allocations until there is no memory

 private:
  Runtime& real_ = default_runtime();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
};

} // namespace torchkv::testing

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <vector>

#include "wrapped_runtime.h"

namespace torchkv::testing {

// The real runtime, with memory that is counted and can run out.
class CountingRuntime final : public WrappedRuntime {
 public:
  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    TORCH_CHECK(num_left-- > 0, "no memory");
    at::Tensor result = WrappedRuntime::allocate(sizes, strides, dtype, device);
    bytes += static_cast<int64_t>(result.nbytes());
    tensors_.emplace_back(result.getIntrusivePtr());
    return result;
  }

  // Bytes of the allocated tensors.
  size_t num_alive() const {
    size_t count = 0;
    for (const auto& tensor : tensors_) {
      count += tensor.expired() ? 0 : 1;
    }
    return count;
  }

  int64_t bytes = 0; // allocated
  int64_t num_left = 1 << 30; // allocations until memory runs out

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> tensors_;
};

} // namespace torchkv::testing

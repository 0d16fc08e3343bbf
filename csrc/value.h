#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace torchkv {

// A position in the replica list of a call. Several positions may share a
// device: four CPU tensors stand for four devices.
struct Place {
  int32_t index;
  c10::Device device;
};

// One pushed thing, in one of the forms the pipeline can add up. It does not
// own its tensor: it points into the caller's Arguments and ends with the call.
// Row-sparse and encoded forms join `Form` with the features that make them.
struct Value {
  enum class Form : uint8_t { kDense };

  Form form = Form::kDense;
  const at::Tensor* data = nullptr;
  Place place{0, c10::kCPU};
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchkv {

// One pushed thing, in one of the forms that Comm can add up. It does not own
// its tensor: it points into the call's Tensors and ends with the call.
// Row-sparse and encoded forms join `Form` with the features that make them.
struct Value {
  enum class Form : uint8_t { kDense };

  Form form = Form::kDense;
  const at::Tensor* data = nullptr;
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchkv {

// How a tensor stands for the elements of a value other than by holding them:
// the tensor is then a payload, which the backend registered for `form`
// (comm/backends.h) decodes. Forms with parameters of their own derive from it.
struct Encoding {
  virtual ~Encoding() = default;

  const char* form = ""; // compared as text
  c10::SmallVector<int64_t, 4> sizes; // of the value
  c10::ScalarType dtype = c10::kFloat; // of the value
};

// A pushed value. It owns nothing: it points into the Tensors of its call.
struct Value {
  const at::Tensor* data =
      nullptr; // the elements or, with an encoding, payload
  const Encoding* encoding = nullptr; // null: dense
  // Of an encoded value, the first element that is asked for; how many, the
  // tensor to which it is added says.
  int64_t begin = 0;

  Value() = default;
  Value(const at::Tensor* data_, const Encoding* encoding_ = nullptr)
      : data(data_), encoding(encoding_) {}

  // The tensor of the elements; null where they are encoded. Whoever reads
  // elements asks this, and nothing else looks at the form.
  const at::Tensor* dense() const {
    return encoding == nullptr ? data : nullptr;
  }
  c10::ScalarType dtype() const {
    return encoding == nullptr ? data->scalar_type() : encoding->dtype;
  }
  c10::Device device() const {
    return data->device();
  }
};

} // namespace torchkv

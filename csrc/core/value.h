#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace torchkv {

// How a tensor encodes the elements of a value: it is a payload, which the
// backend registered for `form` (comm/backends.h) decodes. Forms with
// parameters derive from it.
struct Encoding {
  virtual ~Encoding() = default;

  const char* form = ""; // compared as text
  c10::SmallVector<int64_t, 4> sizes; // of the value
  c10::ScalarType dtype = c10::kFloat; // of the value
};

// A pushed value. It owns nothing: it points into the Tensors of its call.
struct Value {
  const at::Tensor* data = nullptr; // the elements, or the encoding's payload
  const Encoding* encoding = nullptr; // null: dense
  // First element to decode of an encoded value; the result's size says how
  // many.
  int64_t begin = 0;

  Value() = default;
  Value(const at::Tensor* data_, const Encoding* encoding_ = nullptr)
      : data(data_), encoding(encoding_) {}

  // The tensor of the elements; null if they are encoded. Elements are read
  // only through this.
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

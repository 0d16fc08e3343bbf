#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "objects.h"

namespace torchkv {

// Methods of torchkv._C.KVStore that concern row-sparse keys.

// `init`: name, numbers and seed.
inline void init_rows(
    const BoundStore& self,
    py::handle key,
    const std::vector<int64_t>& row_shape,
    const at::ScalarType& dtype,
    std::optional<int64_t> num_rows,
    const std::tuple<std::string, NumbersByName, int64_t>& init) {
  const auto& [name, numbers, seed] = init;
  PythonCalls::init_rows(
      self,
      key,
      row_shape,
      dtype,
      num_rows,
      make_row_init("init_rows", name, numbers, seed));
}

inline bool is_row_sparse(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("is_row_sparse").key(key);
  return PythonCalls::without_gil([&] { return self->is_row_sparse(parsed); });
}

inline int64_t num_rows(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("num_rows").key(key);
  return PythonCalls::without_gil([&] { return self->num_rows(parsed); });
}

inline at::Device row_device(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("row_device").key(key);
  return PythonCalls::without_gil([&] { return self->row_device(parsed); });
}

inline void check_row_init(
    const std::string& name,
    const NumbersByName& numbers,
    int64_t seed) {
  make_row_init("init_rows", name, numbers, seed);
}

} // namespace torchkv

#pragma once

#include "objects.h"

namespace torchkv {

// What calls have done with each key, in the order of KeyStats's members.
inline py::list stats(const BoundStore& self, py::handle key) {
  const Keys keys = Parser("stats").keys(key);
  const auto rows = PythonCalls::without_gil([&] { return self->stats(keys); });
  py::list result;
  for (const auto& row : rows) {
    result.append(
        py::make_tuple(
            row.pushes,
            row.pulls,
            row.bytes_pushed,
            row.bytes_pulled,
            row.sum_seconds,
            row.update_seconds,
            row.copy_seconds));
  }
  return result;
}

} // namespace torchkv

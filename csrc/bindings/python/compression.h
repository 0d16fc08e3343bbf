#pragma once

#include <string>
#include <utility>
#include <vector>

#include "objects.h"

namespace torchkv {

// Methods of torchkv._C.KVStore that concern its gradient compression.

// `groups`: name and options of each codec; `keys`: key -> group.
inline void set_gradient_compression(
    const BoundStore& self,
    const std::vector<std::pair<std::string, NumbersByName>>& groups,
    const py::dict& keys) {
  constexpr auto* op = "set_gradient_compression";
  const Parser parser(op);
  Compression compression;
  for (const auto& [name, numbers] : groups) {
    compression.groups.push_back(make_codec(op, name, numbers));
  }
  for (const auto& [key, group] : keys) {
    compression.keys[parser.key(key)] = group.cast<size_t>();
  }
  const py::gil_scoped_release no_gil;
  self->set_gradient_compression(compression);
}

// The same arguments; no groups if values are pushed as they are.
inline py::tuple gradient_compression(const BoundStore& self) {
  const Compression compression =
      PythonCalls::without_gil([&] { return self->gradient_compression(); });
  py::list groups;
  for (const auto& codec : compression.groups) {
    groups.append(py::make_tuple(name_of(codec), numbers_of(codec)));
  }
  py::dict keys;
  for (const auto& [key, group] : compression.keys) {
    keys[py::cast(key)] = group;
  }
  return py::make_tuple(groups, keys);
}

} // namespace torchkv

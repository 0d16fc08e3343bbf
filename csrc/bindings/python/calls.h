#pragma once

#include <torch/csrc/Dtype.h>

#include <utility>
#include <vector>

#include "../../kvstore.h"
#include "bound.h"
#include "objects.h"
#include "updater.h"

namespace torchkv {

// The methods of torchkv._C.KVStore beside those of Calls.

using Self = c10::intrusive_ptr<KVStore>;
using BoundStore = Bound<KVStore>;
using Parser = ArgumentParser<PythonObjects>;
using PythonCalls = Calls<PythonObjects>;

inline py::list keys(const BoundStore& self) {
  std::vector<Key> keys;
  {
    const py::gil_scoped_release no_gil;
    keys = self->keys();
  }
  return to_python(keys);
}

inline py::tuple shape(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("shape").key(key);
  std::vector<int64_t> sizes;
  {
    const py::gil_scoped_release no_gil;
    sizes = self->shape(parsed);
  }
  return py::tuple(py::cast(sizes));
}

inline py::object dtype(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("dtype").key(key);
  c10::ScalarType type{};
  {
    const py::gil_scoped_release no_gil;
    type = self->dtype(parsed);
  }
  return py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

inline void set_updater(const BoundStore& self, const py::object& updater) {
  auto parsed = parse_updater(updater);
  const py::gil_scoped_release no_gil;
  self->set_updater(std::move(parsed));
}

} // namespace torchkv

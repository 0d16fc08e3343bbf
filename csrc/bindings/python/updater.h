#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "../../update/script_updater.h"
#include "objects.h"

namespace torchkv {

// What an updater has returned, at any depth of practical use.
inline Returned what_is_in(
    py::handle object,
    const at::Tensor& stored,
    int depth = 0) {
  if (const at::Tensor* tensor = PythonObjects::as_tensor(object)) {
    return what_is(*tensor, stored);
  }
  if (std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") == 0) {
    const auto data = object.attr("ctypes").attr("data").cast<uintptr_t>();
    return what_is(data, stored);
  }
  Returned result = Returned::kNoTensor;
  const bool is_list = PythonObjects::is_list(object);
  if (depth == 4 || (!is_list && !PyDict_Check(object.ptr()))) {
    return result;
  }
  const py::list items = is_list
      ? py::list(py::reinterpret_borrow<py::object>(object))
      : py::list(py::reinterpret_borrow<py::dict>(object).attr("values")());
  for (const auto& item : items) {
    result = std::max(result, what_is_in(item, stored, depth + 1));
  }
  return result;
}

// A Python callable as updater. It may be freed by any thread.
class PythonUpdater final : public OpaqueUpdater {
 public:
  PythonUpdater(py::object callable, bool takes_rows)
      : OpaqueUpdater(object_of(callable), takes_rows),
        callable_(std::move(callable)) {}
  ~PythonUpdater() override {
    PyObject* callable = callable_.release().ptr();
    if (Py_IsInitialized() == 0) {
      return; // the interpreter is gone, and its objects with it
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(callable);
    PyGILState_Release(gil);
  }
  C10_DISABLE_COPY_AND_ASSIGN(PythonUpdater);

  void update(const Key& key, const at::Tensor& input, const at::Tensor& stored)
      override {
    const py::gil_scoped_acquire gil;
    const py::object returned = callable_(key, input, stored);
    check_returned(key, what_is_in(returned, stored), stored);
  }
  std::optional<KeyKind> key_kind() const override {
    return std::nullopt;
  }
  PyObject* callable() const {
    return callable_.ptr();
  }
  at::Tensor serialize() const override {
    TORCH_CHECK_TYPE(
        false,
        "save: expected an updater that can be copied (None, a TorchScript "
        "function or module), but got a Python callable of type ",
        PythonObjects::type_name(callable_),
        "; call set_updater(None) first and set_updater(...) on the copy");
  }

 private:
  // Every access to `object.method` creates a new method object.
  static const void* object_of(const py::object& callable) {
    return PyMethod_Check(callable.ptr()) ? PyMethod_GET_SELF(callable.ptr())
                                          : callable.ptr();
  }

  py::object callable_;
};

// Whether a call of `function` only creates a coroutine or generator.
inline bool makes_coroutine(const py::object& function) {
  const auto inspect = py::module_::import("inspect");
  for (const auto* kind :
       {"iscoroutinefunction", "isgeneratorfunction", "isasyncgenfunction"}) {
    if (inspect.attr(kind)(function).cast<bool>()) {
      return true;
    }
  }
  return false;
}

inline std::shared_ptr<OpaqueUpdater> parse_updater(
    const py::object& updater,
    bool takes_rows) {
  if (updater.is_none()) {
    return nullptr;
  }
  if (const auto module = torch::jit::as_module(updater)) {
    return std::make_shared<ScriptUpdater>(*module, takes_rows);
  }
  if (py::isinstance<torch::jit::StrongFunctionPtr>(updater)) {
    TORCH_CHECK_TYPE(
        py::detail::is_holder_constructed(updater.ptr()),
        "set_updater: expected a TorchScript function, but got a "
        "ScriptFunction whose __init__ was not called");
    return std::make_shared<ScriptUpdater>(
        py::cast<torch::jit::StrongFunctionPtr>(updater), takes_rows);
  }
  TORCH_CHECK_TYPE(
      PyCallable_Check(updater.ptr()) != 0,
      "set_updater: expected None, a callable (key, input, stored) or a "
      "TorchScript function or module, but got ",
      PythonObjects::type_name(updater));
  TORCH_CHECK_TYPE(
      !makes_coroutine(updater) &&
          !makes_coroutine(py::type::of(updater).attr("__call__")),
      "set_updater: expected a callable that does its work when it is called, "
      "but got a coroutine or generator function");
  return std::make_shared<PythonUpdater>(updater, takes_rows);
}

inline void set_updater(
    const BoundStore& self,
    const py::object& updater,
    py::handle sparse) {
  auto parsed =
      parse_updater(updater, as_bool("set_updater", "sparse", sparse));
  const py::gil_scoped_release no_gil;
  self->set_updater(std::move(parsed));
}

} // namespace torchkv

#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "../../core/key.h"
#include "../../kvstore.h"
#include "../calls.h"
#include "../tracing.h"
#include "bound.h"

namespace torchkv {

// Python objects as arguments and results. They are converted by hand, because
// pybind11's casters for nested lists of tensors cost more than a small push.

// REQUIRES: a str.
inline std::string utf8_of(const char* op, const char* what, PyObject* text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text, &size);
  if (bytes == nullptr) {
    PyErr_Clear();
    TORCH_CHECK_VALUE(
        false,
        op,
        ": expected a str that UTF-8 can encode as ",
        what,
        ", but got one with a lone surrogate");
  }
  return {bytes, static_cast<size_t>(size)};
}

inline void check_fits(const char* op, bool fits, const char* actual) {
  TORCH_CHECK_VALUE(
      fits,
      op,
      ": expected a key that fits in 64 bits, but got a ",
      actual,
      " int");
}

// What torchkv.tracing knows of torch.fx; set at import, never freed.
struct FxTracing {
  py::handle names; // a dict, or an object of threading.local
  py::handle dict; // of the latter: "__dict__"
  py::handle flag;
  py::handle is_symbolic_trace;
};
inline FxTracing fx_tracing;

inline void find_fx_tracing() {
  const auto module = py::module_::import("torchkv.tracing");
  fx_tracing.names = py::object(module.attr("FX_NAMES")).release();
  if (!py::isinstance<py::dict>(fx_tracing.names)) {
    fx_tracing.dict = py::str("__dict__").release();
  }
  fx_tracing.flag = py::object(module.attr("FX_FLAG")).release();
  fx_tracing.is_symbolic_trace =
      py::object(module.attr("is_symbolic_trace")).release();
}

inline void refuse_tracing(const char* op) {
  if (torch::jit::tracer::isTracing()) {
    throw_traced(op, "torch.jit.trace");
  }
  refuse_graph_capture(op);
  // Not the attribute itself: where it is missing, an exception would be slow.
  const py::object names = fx_tracing.dict
      ? fx_tracing.names.attr(fx_tracing.dict)
      : py::reinterpret_borrow<py::object>(fx_tracing.names);
  const PyObject* may_trace =
      PyDict_GetItemWithError(names.ptr(), fx_tracing.flag.ptr());
  if (may_trace == Py_True && fx_tracing.is_symbolic_trace().cast<bool>()) {
    throw_traced(
        op,
        "torch.fx.symbolic_trace",
        "from a function that torch.fx.wrap names, which is recorded as one "
        "call and runs each time");
  }
}

// pybind11's own conversions take None and numpy's numbers for these.
inline bool as_bool(const char* op, const char* name, py::handle value) {
  TORCH_CHECK_TYPE(
      PyBool_Check(value.ptr()),
      op,
      ": expected True or False as ",
      name,
      ", but got ",
      Py_TYPE(value.ptr())->tp_name);
  return value.ptr() == Py_True;
}

inline int64_t as_int64(const char* op, const char* name, py::handle value) {
  TORCH_CHECK_TYPE(
      PyIndex_Check(value.ptr()) && !PyBool_Check(value.ptr()),
      op,
      ": expected an int as ",
      name,
      ", but got ",
      Py_TYPE(value.ptr())->tp_name);
  const auto index =
      py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) {
    throw py::error_already_set();
  }
  int overflow = 0;
  const int64_t result = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  TORCH_CHECK_VALUE(
      overflow == 0,
      op,
      ": expected ",
      name,
      " to fit in 64 bits, but got ",
      py::str(index).cast<std::string>());
  return result;
}

struct PythonObjects {
  using Object = py::handle;

  // Anything with __index__ counts as int, except a bool.
  static std::optional<Key> as_key(const char* op, Object object) {
    if (PyUnicode_Check(object.ptr())) {
      return Key(utf8_of(op, "key", object.ptr()));
    }
    if (PyBool_Check(object.ptr()) || !PyIndex_Check(object.ptr())) {
      return std::nullopt;
    }
    if (const at::Tensor* tensor = as_tensor(object)) {
      // Every tensor has __index__, which raises for all but these.
      if (tensor->numel() != 1 ||
          !c10::isIntegralType(tensor->scalar_type(), /*includeBool=*/false)) {
        return std::nullopt;
      }
      if (tensor->scalar_type() == c10::kUInt64) { // __index__ overflows
        const uint64_t id = tensor->item().toUInt64();
        check_fits(op, id <= std::numeric_limits<int64_t>::max(), "larger");
        return Key(static_cast<int64_t>(id));
      }
    }
    // __index__ may run Python code that drops the list the object is in.
    const auto held = py::reinterpret_borrow<py::object>(object);
    const auto index =
        py::reinterpret_steal<py::object>(PyNumber_Index(object.ptr()));
    if (!index) {
      throw py::error_already_set();
    }
    int overflow = 0;
    const int64_t id = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    check_fits(op, overflow == 0, overflow > 0 ? "larger" : "smaller");
    return Key(id);
  }
  static const at::Tensor* as_tensor(Object object) {
    // Not THPVariable_Check: it asks isinstance, which a mock can deceive.
    auto* type = reinterpret_cast<PyTypeObject*>(THPVariableClass);
    return PyObject_TypeCheck(object.ptr(), type)
        ? &THPVariable_Unpack(object.ptr())
        : nullptr;
  }
  static bool is_list(Object object) {
    return PyList_Check(object.ptr()) || PyTuple_Check(object.ptr());
  }
  static int64_t size(Object object) {
    return PySequence_Fast_GET_SIZE(object.ptr());
  }
  static Object item(Object object, int64_t i) {
    TORCH_CHECK_VALUE(
        i < size(object), "expected a list that does not change during a call");
    return PySequence_Fast_GET_ITEM(object.ptr(), i);
  }
  static std::string type_name(Object object) {
    return Py_TYPE(object.ptr())->tp_name;
  }
  static bool is_none(Object object) {
    return object.is_none();
  }
  static void refuse_tracing(const char* op) {
    torchkv::refuse_tracing(op);
  }
  using Released = py::gil_scoped_release;

  using Store = Bound<KVStore>;
  using Int = py::handle;
  using Bool = py::handle;
  static CallOptions options(const char* op, Int priority, Bool async_op) {
    return {
        as_int64(op, "priority", priority), as_bool(op, "async_op", async_op)};
  }
  static int64_t as_int(const char* op, const char* name, const Int& value) {
    return as_int64(op, name, value);
  }
  static bool as_bool(const char* op, const char* name, Bool value) {
    return torchkv::as_bool(op, name, value);
  }
  using Work = WorkPtr; // null is None
  static Work work(WorkPtr work) {
    return work;
  }
  static py::object result(const WorkPtr& work) {
    return py::cast(work);
  }
  static py::object result(
      const std::vector<at::Tensor>& tensors,
      bool single) {
    return single ? py::cast(tensors[0]) : py::cast(tensors);
  }
};

using Self = c10::intrusive_ptr<KVStore>;
using BoundStore = Bound<KVStore>;
using Parser = ArgumentParser<PythonObjects>;
using PythonCalls = Calls<PythonObjects>;

// A method without arguments, called without the GIL.
template <auto kMethod, class T = KVStore>
auto released(const Bound<T>& self) {
  const py::gil_scoped_release no_gil;
  return ((*self).*kMethod)();
}

} // namespace torchkv

#pragma once

#include <torch/csrc/Dtype.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <utility>
#include <vector>

#include "../../kvstore.h"
#include "../tracing.h"
#include "bound.h"
#include "objects.h"
#include "updater.h"

namespace torchkv {

// The functions bound as methods of torchkv._C.KVStore that read and write
// values. Each parses with the GIL, and releases it for the store.

using Self = c10::intrusive_ptr<KVStore>;
using BoundStore = Bound<KVStore>;
using Parser = ArgumentParser<PythonObjects>;

// What torchkv.tracing knows of torch.fx; set at import, never freed.
struct FxTracing {
  py::handle names; // where some thread's tracing is noted
  py::handle flag;
  py::handle is_symbolic_trace;
};
inline FxTracing fx_tracing;

inline void find_fx_tracing() {
  const auto module = py::module_::import("torchkv.tracing");
  fx_tracing.names = module.attr("FX_NAMES").cast<py::dict>().release();
  fx_tracing.flag = py::str("_is_fx_tracing_flag").release();
  fx_tracing.is_symbolic_trace =
      py::object(module.attr("is_symbolic_trace")).release();
}

inline void refuse_tracing(const char* op) {
  if (torch::jit::tracer::isTracing()) {
    throw_traced(op, "torch.jit.trace");
  }
  refuse_graph_capture(op);
  const PyObject* some_thread_traces =
      PyDict_GetItemWithError(fx_tracing.names.ptr(), fx_tracing.flag.ptr());
  if (some_thread_traces == Py_True &&
      fx_tracing.is_symbolic_trace().cast<bool>()) {
    throw_traced(
        op,
        "torch.fx.symbolic_trace",
        "from a function that torch.fx.wrap names, which is recorded as one "
        "call and runs each time");
  }
}

inline void init(const BoundStore& self, py::handle key, py::handle value) {
  constexpr auto* op = "init";
  refuse_tracing(op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const py::gil_scoped_release no_gil;
  self->init(keys, values);
}

inline CallOptions options_of(
    const char* op,
    py::handle priority,
    py::handle async_op) {
  return {
      as_int64(op, "priority", priority), as_bool(op, "async_op", async_op)};
}

// Null, which is None, unless the call is asynchronous.
inline WorkPtr push(
    const BoundStore& self,
    py::handle key,
    py::handle value,
    py::handle priority,
    py::handle async_op) {
  constexpr auto* op = "push";
  refuse_tracing(op);
  const CallOptions options = options_of(op, priority, async_op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const py::gil_scoped_release no_gil;
  return self->push(keys, values, options);
}

inline py::object pull(
    const BoundStore& self,
    py::handle key,
    py::handle out,
    py::handle priority,
    py::handle ignore_sparse,
    py::handle async_op) {
  constexpr auto* op = "pull";
  refuse_tracing(op);
  as_bool(op, "ignore_sparse", ignore_sparse); // no sparse outs yet
  const CallOptions options = options_of(op, priority, async_op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  if (!out.is_none()) {
    const Tensors outs = parser.tensors(keys, out.ptr(), "out");
    WorkPtr work;
    {
      const py::gil_scoped_release no_gil;
      work = self->pull(keys, outs, options);
    }
    return py::cast(std::move(work));
  }
  parser.check_sync_without_out(keys, options.async_op);
  std::vector<at::Tensor> pulled;
  {
    const py::gil_scoped_release no_gil;
    pulled = self->pull(keys, options);
  }
  if (keys.single) {
    return to_python(pulled[0]);
  }
  py::list result;
  for (const auto& tensor : pulled) {
    result.append(to_python(tensor));
  }
  return result;
}

inline WorkPtr pushpull(
    const BoundStore& self,
    py::handle key,
    py::handle value,
    py::handle out,
    py::handle priority,
    py::handle async_op) {
  constexpr auto* op = "pushpull";
  refuse_tracing(op);
  const CallOptions options = options_of(op, priority, async_op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const Tensors outs =
      out.is_none() ? values : parser.tensors(keys, out.ptr(), "out");
  const py::gil_scoped_release no_gil;
  return self->pushpull(keys, values, outs, options);
}

inline WorkPtr broadcast(
    const BoundStore& self,
    py::handle key,
    py::handle value,
    py::handle out,
    py::handle priority,
    py::handle async_op) {
  constexpr auto* op = "broadcast";
  refuse_tracing(op);
  const CallOptions options = options_of(op, priority, async_op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const Tensors outs = parser.tensors(keys, out.ptr(), "out");
  const py::gil_scoped_release no_gil;
  return self->broadcast(keys, values, outs, options);
}

inline void assign(const BoundStore& self, py::handle key, py::handle value) {
  constexpr auto* op = "assign";
  refuse_tracing(op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const py::gil_scoped_release no_gil;
  self->assign(keys, values);
}

inline void erase(const BoundStore& self, py::handle key) {
  constexpr auto* op = "delete";
  refuse_tracing(op);
  const Keys keys = Parser(op).keys(key.ptr());
  const py::gil_scoped_release no_gil;
  self->erase(keys);
}

inline py::list keys(const BoundStore& self) {
  std::vector<Key> keys;
  {
    const py::gil_scoped_release no_gil;
    keys = self->keys();
  }
  return to_python(keys);
}

inline bool contains(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("in").key(key.ptr());
  const py::gil_scoped_release no_gil;
  return self->contains(parsed);
}

inline py::tuple shape(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("shape").key(key.ptr());
  std::vector<int64_t> sizes;
  {
    const py::gil_scoped_release no_gil;
    sizes = self->shape(parsed);
  }
  return py::tuple(py::cast(sizes));
}

inline py::object dtype(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("dtype").key(key.ptr());
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

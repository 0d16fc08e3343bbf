// The Python door: torchkv._C. It unpacks Python objects by hand, because
// pybind11's casters for nested lists of tensors cost more than a small push.
#include <ATen/OpMathType.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/jit_exception.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/gil.h"
#include "../core/text.h"
#include "../device/work.h"
#include "../kvstore.h"
#include "../store/type.h"
#include "../update/script_updater.h"
#include "argument_parser.h"
#include "bound.h"
#include "tracing.h"

namespace torchkv {
namespace {

// REQUIRES: a str.
std::string utf8_of(const char* op, const char* what, PyObject* text) {
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

void check_fits(const char* op, bool fits, const char* actual) {
  TORCH_CHECK_VALUE(
      fits,
      op,
      ": expected a key that fits in 64 bits, but got a ",
      actual,
      " int");
}

struct PythonDoor {
  using Object = PyObject*; // borrowed

  // Anything with __index__ counts as int, except a bool.
  static std::optional<Key> as_key(const char* op, Object object) {
    if (PyUnicode_Check(object)) {
      return Key(utf8_of(op, "key", object));
    }
    if (PyBool_Check(object) || !PyIndex_Check(object)) {
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
        py::reinterpret_steal<py::object>(PyNumber_Index(object));
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
    return PyObject_TypeCheck(object, type) ? &THPVariable_Unpack(object)
                                            : nullptr;
  }
  static bool is_list(Object object) {
    return PyList_Check(object) || PyTuple_Check(object);
  }
  static int64_t size(Object object) {
    return PyList_Check(object) ? PyList_GET_SIZE(object)
                                : PyTuple_GET_SIZE(object);
  }
  static Object item(Object object, int64_t i) {
    TORCH_CHECK_VALUE(
        i < size(object), "expected a list that does not change during a call");
    return PyList_Check(object) ? PyList_GET_ITEM(object, i)
                                : PyTuple_GET_ITEM(object, i);
  }
  static std::string type_name(Object object) {
    return Py_TYPE(object)->tp_name;
  }
};

using Parser = ArgumentParser<PythonDoor>;

py::object to_python(const Key& key) {
  if (key.kind() == KeyKind::kInt) {
    return py::int_(key.id());
  }
  return py::str(key.text());
}

py::list to_python(const std::vector<Key>& keys) {
  py::list result;
  for (const auto& key : keys) {
    result.append(to_python(key));
  }
  return result;
}

py::object to_python(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// What an updater's result holds, at any depth that a program would write.
Returned what_is_in(
    py::handle object,
    const at::Tensor& stored,
    int depth = 0) {
  if (const at::Tensor* tensor = PythonDoor::as_tensor(object.ptr())) {
    return what_is(*tensor, stored);
  }
  if (std::strcmp(Py_TYPE(object.ptr())->tp_name, "numpy.ndarray") == 0) {
    const auto data = object.attr("ctypes").attr("data").cast<uintptr_t>();
    return what_is(data, stored);
  }
  Returned result = Returned::kNoTensor;
  const bool is_list = PythonDoor::is_list(object.ptr());
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
  explicit PythonUpdater(py::object callable)
      : OpaqueUpdater(object_of(callable)), callable_(std::move(callable)) {}
  ~PythonUpdater() override {
    PyObject* callable = callable_.release().ptr();
    if (Py_IsInitialized() == 0) {
      return; // the interpreter is gone, and its objects with it
    }
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(callable);
    PyGILState_Release(gil);
  }
  PythonUpdater(const PythonUpdater&) = delete;
  PythonUpdater& operator=(const PythonUpdater&) = delete;
  PythonUpdater(PythonUpdater&&) = delete;
  PythonUpdater& operator=(PythonUpdater&&) = delete;

  void update(const Key& key, const at::Tensor& input, const at::Tensor& stored)
      override {
    const py::gil_scoped_acquire gil;
    const py::object returned =
        callable_(to_python(key), to_python(input), to_python(stored));
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
        PythonDoor::type_name(callable_.ptr()),
        "; call set_updater(None) first and set_updater(...) on the copy");
  }

 private:
  // Every look at `object.method` makes another method of the same object.
  static const void* object_of(const py::object& callable) {
    return PyMethod_Check(callable.ptr()) ? PyMethod_GET_SELF(callable.ptr())
                                          : callable.ptr();
  }

  py::object callable_;
};

// Whether a call of `function` only makes an object that nobody would run.
bool makes_coroutine(const py::object& function) {
  const auto inspect = py::module_::import("inspect");
  for (const auto* kind :
       {"iscoroutinefunction", "isgeneratorfunction", "isasyncgenfunction"}) {
    if (inspect.attr(kind)(function).cast<bool>()) {
      return true;
    }
  }
  return false;
}

std::shared_ptr<OpaqueUpdater> parse_updater(const py::object& updater) {
  if (updater.is_none()) {
    return nullptr;
  }
  if (const auto module = torch::jit::as_module(updater)) {
    return std::make_shared<ScriptUpdater>(*module);
  }
  if (py::isinstance<torch::jit::StrongFunctionPtr>(updater)) {
    TORCH_CHECK_TYPE(
        py::detail::is_holder_constructed(updater.ptr()),
        "set_updater: expected a TorchScript function, but got a "
        "ScriptFunction whose __init__ was not called");
    return std::make_shared<ScriptUpdater>(
        py::cast<torch::jit::StrongFunctionPtr>(updater));
  }
  TORCH_CHECK_TYPE(
      PyCallable_Check(updater.ptr()) != 0,
      "set_updater: expected None, a callable (key, input, stored) or a "
      "TorchScript function or module, but got ",
      PythonDoor::type_name(updater.ptr()));
  TORCH_CHECK_TYPE(
      !makes_coroutine(updater) &&
          !makes_coroutine(py::type::of(updater).attr("__call__")),
      "set_updater: expected a callable that does its work when it is called, "
      "but got a coroutine or generator function");
  return std::make_shared<PythonUpdater>(updater);
}

// Raises Python's own exception for an error that TorchScript code raised by
// its name (`raise ValueError("...")`); returns false where it has none.
bool raise_script_error(const torch::jit::JITException& error) {
  const auto qualified = error.getPythonClassName();
  const auto message = error.getOriginalMsg();
  if (!qualified || !message) {
    return false;
  }
  const std::string class_name = qualified->substr(qualified->rfind('.') + 1);
  const auto type = py::module_::import("builtins")
                        .attr("__dict__")
                        .attr("get")(class_name, py::none());
  if (!PyExceptionClass_Check(type.ptr())) {
    return false;
  }
  try {
    const auto exception = type(*message);
    PyErr_SetObject(type.ptr(), exception.ptr());
  } catch (const py::error_already_set&) {
    return false; // its constructor takes more than a message
  }
  return true;
}

// NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11's signature
void translate_exception(std::exception_ptr pointer) {
  if (!pointer) {
    return;
  }
  try {
    std::rethrow_exception(pointer);
  } catch (const UnknownKeyError& error) {
    PyErr_SetString(PyExc_KeyError, error.what_without_backtrace());
  } catch (const torch::jit::JITException& error) {
    if (!raise_script_error(error)) {
      throw; // to torch's own translator
    }
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what()); // pybind11: a RuntimeError
  } catch (const py::builtin_exception& error) {
    error.set_error(); // a std::exception, too
  } catch (const std::exception&) {
    torch::translate_exception_to_python(pointer);
  }
}

using Self = c10::intrusive_ptr<KVStore>;
using Store = Bound<KVStore>;

// What torchkv.tracing knows of torch.fx; set at import, never freed.
struct FxTracing {
  py::handle names; // where some thread's tracing is noted
  py::handle flag;
  py::handle is_symbolic_trace;
};
FxTracing fx_tracing;

void find_fx_tracing() {
  const auto module = py::module_::import("torchkv.tracing");
  fx_tracing.names = module.attr("FX_NAMES").cast<py::dict>().release();
  fx_tracing.flag = py::str("_is_fx_tracing_flag").release();
  fx_tracing.is_symbolic_trace =
      py::object(module.attr("is_symbolic_trace")).release();
}

void refuse_tracing(const char* op) {
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

// pybind11's own conversions take None and numpy's numbers for these.
bool as_bool(const char* op, const char* name, py::handle value) {
  TORCH_CHECK_TYPE(
      PyBool_Check(value.ptr()),
      op,
      ": expected True or False as ",
      name,
      ", but got ",
      PythonDoor::type_name(value.ptr()));
  return value.ptr() == Py_True;
}

int64_t as_int64(const char* op, const char* name, py::handle value) {
  TORCH_CHECK_TYPE(
      PyIndex_Check(value.ptr()) && !PyBool_Check(value.ptr()),
      op,
      ": expected an int as ",
      name,
      ", but got ",
      PythonDoor::type_name(value.ptr()));
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

void init(const Store& self, py::handle key, py::handle value) {
  constexpr auto* op = "init";
  refuse_tracing(op);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const py::gil_scoped_release no_gil;
  self->init(keys, values);
}

// Null, which is None, where the call is not asynchronous.
WorkPtr push(
    const Store& self,
    py::handle key,
    py::handle value,
    py::handle priority_object,
    py::handle async_object) {
  constexpr auto* op = "push";
  refuse_tracing(op);
  const int64_t priority = as_int64(op, "priority", priority_object);
  const bool async_op = as_bool(op, "async_op", async_object);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const py::gil_scoped_release no_gil;
  if (async_op) {
    return self->push_async(keys, values, priority);
  }
  self->push(keys, values, priority);
  return {};
}

py::object pull(
    const Store& self,
    py::handle key,
    py::handle out,
    py::handle priority_object,
    py::handle ignore_sparse,
    py::handle async_object) {
  constexpr auto* op = "pull";
  refuse_tracing(op);
  const int64_t priority = as_int64(op, "priority", priority_object);
  as_bool(op, "ignore_sparse", ignore_sparse); // there are no sparse outs yet
  const bool async_op = as_bool(op, "async_op", async_object);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  if (!out.is_none()) {
    const Tensors outs = parser.tensors(keys, out.ptr(), "out");
    WorkPtr work;
    {
      const py::gil_scoped_release no_gil;
      if (async_op) {
        work = self->pull_async(keys, outs, priority);
      } else {
        self->pull(keys, outs, priority);
      }
    }
    return async_op ? py::cast(std::move(work)) : py::none();
  }
  parser.check_sync_without_out(keys, async_op);
  std::vector<at::Tensor> pulled;
  {
    const py::gil_scoped_release no_gil;
    pulled = self->pull(keys, priority);
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

WorkPtr pushpull(
    const Store& self,
    py::handle key,
    py::handle value,
    py::handle out,
    py::handle priority_object,
    py::handle async_object) {
  constexpr auto* op = "pushpull";
  refuse_tracing(op);
  const int64_t priority = as_int64(op, "priority", priority_object);
  const bool async_op = as_bool(op, "async_op", async_object);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const Tensors outs =
      out.is_none() ? values : parser.tensors(keys, out.ptr(), "out");
  const py::gil_scoped_release no_gil;
  if (async_op) {
    return self->pushpull_async(keys, values, outs, priority);
  }
  self->pushpull(keys, values, outs, priority);
  return {};
}

WorkPtr broadcast(
    const Store& self,
    py::handle key,
    py::handle value,
    py::handle out,
    py::handle priority_object,
    py::handle async_object) {
  constexpr auto* op = "broadcast";
  refuse_tracing(op);
  const int64_t priority = as_int64(op, "priority", priority_object);
  const bool async_op = as_bool(op, "async_op", async_object);
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  const Tensors values = parser.tensors(keys, value.ptr(), "value");
  const Tensors outs = parser.tensors(keys, out.ptr(), "out");
  const py::gil_scoped_release no_gil;
  if (async_op) {
    return self->broadcast_async(keys, values, outs, priority);
  }
  self->broadcast(keys, values, outs, priority);
  return {};
}

void erase(const Store& self, py::handle key) {
  constexpr auto* op = "delete";
  refuse_tracing(op);
  const Keys keys = Parser(op).keys(key.ptr());
  const py::gil_scoped_release no_gil;
  self->erase(keys);
}

py::list keys(const Store& self) {
  std::vector<Key> keys;
  {
    const py::gil_scoped_release no_gil;
    keys = self->keys();
  }
  return to_python(keys);
}

bool contains(const Store& self, py::handle key) {
  const Key parsed = Parser("in").key(key.ptr());
  const py::gil_scoped_release no_gil;
  return self->contains(parsed);
}

py::tuple shape(const Store& self, py::handle key) {
  const Key parsed = Parser("shape").key(key.ptr());
  std::vector<int64_t> sizes;
  {
    const py::gil_scoped_release no_gil;
    sizes = self->shape(parsed);
  }
  return py::tuple(py::cast(sizes));
}

py::object dtype(const Store& self, py::handle key) {
  const Key parsed = Parser("dtype").key(key.ptr());
  c10::ScalarType type{};
  {
    const py::gil_scoped_release no_gil;
    type = self->dtype(parsed);
  }
  return py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

void set_updater(const Store& self, const py::object& updater) {
  auto parsed = parse_updater(updater);
  const py::gil_scoped_release no_gil;
  self->set_updater(std::move(parsed));
}

// A reference that does not keep a store alive, for an optimizer that is on it.
class WeakStore final : public c10::intrusive_ptr_target {
 public:
  explicit WeakStore(const Store& store) : store_(store.pointer()) {}

  // Null, which is None, where the store is gone.
  Self lock() const {
    return store_.lock();
  }

 private:
  c10::weak_intrusive_ptr<KVStore> store_;
};

// `options`: key -> (group, lr_mult, wd_mult).
uint64_t set_optimizer(
    const Store& self,
    const std::string& rule,
    const std::vector<NumbersByName>& groups,
    const py::dict& options,
    const NumbersByName& gradient,
    py::handle keep_state_object) {
  constexpr auto* op = "set_optimizer";
  const bool keep_state = as_bool(op, "keep_state", keep_state_object);
  const Parser parser(op);
  Optimizer optimizer;
  for (const auto& numbers : groups) {
    optimizer.groups.push_back(make_rule(op, rule, numbers));
  }
  for (const auto& [key, value] : options) {
    const auto [group, lr_mult, wd_mult] =
        value.cast<std::tuple<size_t, double, double>>();
    optimizer.keys[parser.key(key.ptr())] = {group, lr_mult, wd_mult};
  }
  optimizer.gradient = make_gradient(op, gradient);
  const py::gil_scoped_release no_gil;
  // Python names the keys' operation in its messages, so it checks them.
  return self->set_optimizer(
      std::move(optimizer), keep_state, /*check_keys=*/false);
}

void expect_keys(const Store& self, const py::list& list) {
  const Parser parser("expect_keys");
  Keys keys;
  for (const auto& key : list) {
    keys.list.push_back(parser.key(key.ptr()));
  }
  const py::gil_scoped_release no_gil;
  self->expect_keys(keys);
}

py::list expected_keys(const Store& self) {
  std::vector<Key> keys;
  {
    const py::gil_scoped_release no_gil;
    keys = self->expected_keys();
  }
  return to_python(keys);
}

std::optional<double> grad_norm(const Store& self) {
  const py::gil_scoped_release no_gil;
  return self->grad_norm();
}

// A built-in optimizer as the arguments that set it, after its identity; a
// Python callable as it is; None for any other updater.
py::object optimizer(const Store& self) {
  Updater updater;
  {
    const py::gil_scoped_release no_gil;
    updater = self->current_updater();
  }
  if (const auto* opaque =
          std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater)) {
    const auto* python = dynamic_cast<const PythonUpdater*>(opaque->get());
    return python == nullptr
        ? py::none()
        : py::reinterpret_borrow<py::object>(python->callable());
  }
  const auto* built_in = std::get_if<OptimizerPtr>(&updater);
  if (built_in == nullptr) {
    return py::none();
  }
  const Optimizer& optimizer = **built_in;
  py::list groups;
  for (const auto& rule : optimizer.groups) {
    groups.append(numbers_of(rule));
  }
  py::dict options;
  for (const auto& [key, option] : optimizer.keys) {
    options[to_python(key)] =
        py::make_tuple(option.group, option.lr_mult, option.wd_mult);
  }
  return py::make_tuple(
      optimizer.identity,
      name_of(optimizer.groups[0]),
      groups,
      options,
      numbers_of(optimizer.gradient));
}

int64_t num_skipped(const Store& self) {
  const py::gil_scoped_release no_gil;
  return self->num_skipped();
}

py::list optimizer_states(const Store& self, py::handle key) {
  const Keys keys = Parser("optimizer_states").keys(key.ptr());
  std::vector<KeyState> states;
  {
    const py::gil_scoped_release no_gil;
    states = self->optimizer_states(keys);
  }
  py::list result;
  for (const auto& state : states) {
    py::dict item;
    item["step"] = state.step;
    item["num_accumulated"] = state.num_accumulated;
    for (const auto& [name, tensor] : state.tensors) {
      item[py::str(name)] = to_python(tensor);
    }
    result.append(item);
  }
  return result;
}

void set_optimizer_states(
    const Store& self,
    py::handle key,
    const std::vector<py::dict>& items) {
  constexpr auto* op = "set_optimizer_states";
  const Parser parser(op);
  const Keys keys = parser.keys(key.ptr());
  std::vector<KeyState> states;
  for (const auto& item : items) {
    KeyState state;
    for (const auto& [name, value] : item) {
      const auto text = name.cast<std::string>();
      if (text == "step") {
        state.step = as_int64(op, "step", value);
      } else if (text == "num_accumulated") {
        state.num_accumulated = as_int64(op, "num_accumulated", value);
      } else {
        const at::Tensor* tensor = PythonDoor::as_tensor(value.ptr());
        TORCH_CHECK_TYPE(
            tensor != nullptr,
            op,
            ": expected a tensor as ",
            quoted(text),
            ", but got ",
            PythonDoor::type_name(value.ptr()));
        state.tensors.emplace(text, *tensor);
      }
    }
    states.push_back(std::move(state));
  }
  const py::gil_scoped_release no_gil;
  self->set_optimizer_states(keys, states);
  states.clear(); // tensors with Python objects are let go of without the GIL
}

// Through IValues: pybind11 knows no c10::Dict.
py::object state(const Store& self, py::handle with_keys_object) {
  const bool with_keys = as_bool("state", "with_keys", with_keys_object);
  c10::IValue state;
  {
    const py::gil_scoped_release no_gil;
    state = c10::IValue(self->state(with_keys).to_tuple());
  }
  return torch::jit::toPyObject(std::move(state));
}

Self from_state(const py::object& object) {
  c10::IValue state =
      torch::jit::toIValue(object, c10::getTypePtr<StoreState::Tuple>());
  const py::gil_scoped_release no_gil;
  auto tuple = std::exchange(state, c10::IValue()).to<StoreState::Tuple>();
  return KVStore::from_state(StoreState::from_tuple(std::move(tuple)));
}

// The names of the tensors that a rule keeps for each key.
std::vector<std::string> names_of_states(
    const std::string& rule,
    const NumbersByName& numbers) {
  std::vector<std::string> names;
  for (const char* name : state_names(make_rule("load", rule, numbers))) {
    if (name != nullptr) {
      names.emplace_back(name);
    }
  }
  return names;
}

void take(const Store& self, const Store& other) {
  const py::gil_scoped_release no_gil;
  self->take(*other);
}

void* release_gil() {
  return PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr;
}

void restore_gil(void* state) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

// The store behind a Python object, if nobody else holds it, and if its updater
// is a Python callable that nobody else holds: then Python's garbage collector
// sees all there is to see of a cycle through them.
KVStore* sole_store(PyObject* self) {
  if (!py::detail::is_holder_constructed(self)) {
    return nullptr;
  }
  auto* store = py::cast<KVStore*>(py::handle(self));
  return c10::raw::intrusive_ptr::use_count(store) == 1 ? store : nullptr;
}

int traverse_store(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  int stop = 0;
  if (const KVStore* store = sole_store(self)) {
    store->visit_sole_updater([&](const OpaqueUpdater& updater) {
      if (const auto* python = dynamic_cast<const PythonUpdater*>(&updater)) {
        stop = visit(python->callable(), arg);
      }
    });
  }
  return stop;
}

int clear_store(PyObject* self) {
  if (KVStore* store = sole_store(self)) {
    store->close();
  }
  return 0;
}

// Lets Python's garbage collector find stores in cycles, such as a store whose
// updater is a method of an object that holds the store.
void make_collectable(PyHeapTypeObject* heap_type) {
  auto* type = &heap_type->ht_type;
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_traverse = &traverse_store;
  type->tp_clear = &clear_store;
}

py::object script_object(const Store& self) {
  return torch::jit::toPyObject(c10::IValue(self.pointer()));
}

Self from_script_object(py::handle object) {
  TORCH_CHECK_TYPE(
      py::isinstance<torch::jit::Object>(object) &&
          py::detail::is_holder_constructed(object.ptr()),
      "from_script_object: expected a torch.ScriptObject, but got ",
      PythonDoor::type_name(object.ptr()));
  const c10::IValue value(py::cast<torch::jit::Object>(object)._ivalue());
  const auto& expected = c10::getCustomClassType<Self>();
  TORCH_CHECK_TYPE(
      *value.type() == *expected,
      "from_script_object: expected a torch.ScriptObject of type ",
      expected->annotation_str(),
      ", but got one of type ",
      value.type()->annotation_str());
  return value.toCustomClass<KVStore>();
}

} // namespace

PYBIND11_MODULE(_C, m) {
  py::register_local_exception_translator(&translate_exception);
  set_gil_hooks({&release_gil, &restore_gil});
  find_fx_tracing();

  m.def("did_you_mean", &did_you_mean, py::arg("text"), py::arg("candidates"));
  const auto release = py::call_guard<py::gil_scoped_release>();
  py::class_<Work, WorkPtr>(
      m,
      "Work",
      "What a call with async_op=True has begun, as torch.distributed's.\n\n"
      "On accelerators the call enqueues its work on streams of the store's\n"
      "own, beside the caller's. Until wait(), do not overwrite what was\n"
      "pushed, and do not use the outs; they may be freed. On the CPU the work\n"
      "is done when the call returns. Any thread may call any method.")
      .def(
          "wait",
          [](const Bound<Work>& self) { self->wait(); },
          release,
          "Makes the calling thread's current streams wait for the work.\n\n"
          "What is enqueued on them from now on runs after it. The host does\n"
          "not wait. May be repeated, on other streams, too.")
      .def(
          "is_completed",
          [](const Bound<Work>& self) { return self->is_completed(); },
          release,
          "Whether all is done; of work captured into a CUDA graph, False.")
      .def(
          "__repr__",
          [](const Bound<Work>& self) { return self->repr(); },
          release);
  py::class_<WeakStore, c10::intrusive_ptr<WeakStore>>(m, "WeakKVStore")
      .def("lock", [](const Bound<WeakStore>& self) { return self->lock(); });
  py::class_<KVStore, Self>(
      m, "KVStore", py::custom_type_setup(&make_collectable))
      .def(
          // py::str: a std::string would take bytes, too.
          py::init([](const py::str& type) {
            return c10::make_intrusive<KVStore>(
                utf8_of("create", "type", type.ptr()));
          }),
          py::arg("type"))
      .def_property_readonly(
          "type", [](const Store& self) { return self->type(); })
      .def("init", &init, py::arg("key"), py::arg("value"))
      .def(
          "push",
          &push,
          py::arg("key"),
          py::arg("value"),
          py::arg("priority"),
          py::arg("async_op") = false)
      .def(
          "pull",
          &pull,
          py::arg("key"),
          py::arg("out"),
          py::arg("priority"),
          py::arg("ignore_sparse") = true,
          py::arg("async_op") = false)
      .def(
          "pushpull",
          &pushpull,
          py::arg("key"),
          py::arg("value"),
          py::arg("out"),
          py::arg("priority"),
          py::arg("async_op") = false)
      .def(
          "broadcast",
          &broadcast,
          py::arg("key"),
          py::arg("value"),
          py::arg("out"),
          py::arg("priority"),
          py::arg("async_op") = false)
      .def("delete", &erase, py::arg("key"))
      .def("keys", &keys)
      .def("contains", &contains, py::arg("key"))
      .def(
          "size", [](const Store& self) { return self->size(); }, release)
      .def("shape", &shape, py::arg("key"))
      .def("dtype", &dtype, py::arg("key"))
      .def("set_updater", &set_updater, py::arg("updater"))
      .def(
          "set_optimizer",
          &set_optimizer,
          py::arg("rule"),
          py::arg("groups"),
          py::arg("options"),
          py::arg("gradient"),
          py::arg("keep_state"))
      .def("optimizer", &optimizer)
      .def(
          "weak",
          [](const Store& self) {
            return c10::make_intrusive<WeakStore>(self);
          })
      .def("expect_keys", &expect_keys, py::arg("keys"))
      .def("expected_keys", &expected_keys)
      .def("num_skipped", &num_skipped)
      .def("grad_norm", &grad_norm)
      .def("optimizer_states", &optimizer_states, py::arg("key"))
      .def(
          "set_optimizer_states",
          &set_optimizer_states,
          py::arg("key"),
          py::arg("states"))
      .def(
          "barrier", [](const Store& self) { return self->barrier(); }, release)
      .def(
          "repr", [](const Store& self) { return self->repr(); }, release)
      .def(
          "close", [](const Store& self) { return self->close(); }, release)
      .def("state", &state, py::arg("with_keys") = true)
      .def_static("from_state", &from_state, py::arg("state"))
      .def_static(
          "canonical_type",
          [](const py::str& type) {
            return name(
                parse_store_type(utf8_of("create", "type", type.ptr())));
          },
          py::arg("type"))
      .def("take", &take, py::arg("other"))
      .def_static(
          "key_of",
          [](const std::string& op, py::handle key) {
            return to_python(Parser(op.c_str()).key(key.ptr()));
          },
          py::arg("op"),
          py::arg("key"))
      .def_static(
          "state_names", &names_of_states, py::arg("rule"), py::arg("numbers"))
      .def_static("state_dtype", &at::toOpMathType, py::arg("dtype"))
      .def_static(
          "check_optimizer",
          [](const std::string& op,
             const std::string& rule,
             const NumbersByName& numbers) {
            check_optimizer(
                op.c_str(), make_optimizer(op.c_str(), rule, numbers));
          },
          py::arg("op"),
          py::arg("rule"),
          py::arg("numbers"))
      .def("script_object", &script_object)
      .def_property_readonly(
          "capsule",
          [](const Store& self) { return c10::Capsule(self.pointer()); })
      .def_static(
          "script_class", [] { return c10::getCustomClassType<Self>(); })
      .def_static("from_script_object", &from_script_object, py::arg("object"));
}

} // namespace torchkv

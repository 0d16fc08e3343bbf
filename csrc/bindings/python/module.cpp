// torchkv._C, the only translation unit with Python's headers.
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/jit/runtime/jit_exception.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "../../core/errors.h"
#include "../../core/gil.h"
#include "../../core/signals.h"
#include "../../core/text.h"
#include "../../dist/byte_counts.h"
#include "../../dist/node.h"
#include "../../dist/rendezvous.h"
#include "../../dist/transport/zeromq.h"
#include "../../kvstore.h"
#include "../../store/registry.h"
#include "compression.h"
#include "objects.h"
#include "optimizer.h"
#include "rows.h"
#include "state.h"
#include "stats.h"
#include "store_options.h"
#include "updater.h"

namespace torchkv {
namespace {

// Raises the built-in Python exception that TorchScript code raised by name
// (`raise ValueError("...")`); returns false if there is none.
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

void set_remote_error(const char* name, const RemoteError& error) {
  const py::object type = py::module_::import("torchkv.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what_without_backtrace());
}

// That of PyTorch's default process group, which torchkv.distributed knows.
std::optional<dist::DefaultGroup> default_group() {
  if (Py_IsInitialized() == 0) {
    return std::nullopt;
  }
  const py::gil_scoped_acquire gil;
  const py::object found =
      py::module_::import("torchkv.distributed").attr("default_group")();
  if (found.is_none()) {
    return std::nullopt;
  }
  const auto group = found.cast<py::tuple>();
  return dist::DefaultGroup{
      group[0].cast<int64_t>(),
      group[1].cast<int64_t>(),
      dist::make_rendezvous(group[2].cast<c10::intrusive_ptr<c10d::Store>>())};
}

// As PyThread_get_thread_ident. Python runs signal handlers on this thread.
unsigned long main_thread = 0;

// Ctrl-C, while the main thread waits for other processes. Other threads do not
// acquire the GIL for it, which may be held for long.
void raise_signals() {
  if (Py_IsInitialized() == 0 || PyThread_get_thread_ident() != main_thread) {
    return;
  }
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    throw py::error_already_set();
  }
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
  } catch (const StoreTimeoutError& error) {
    set_remote_error("StoreTimeoutError", error);
  } catch (const WorkerLostError& error) {
    set_remote_error("WorkerLostError", error);
  } catch (const ServerLostError& error) {
    set_remote_error("ServerLostError", error);
  } catch (const RemoteError& error) {
    set_remote_error("RemoteError", error);
  } catch (const py::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what()); // pybind11: a RuntimeError
  } catch (const py::builtin_exception& error) {
    error.set_error(); // a std::exception, too
  } catch (const std::exception&) {
    torch::translate_exception_to_python(pointer);
  }
}

// A weak reference to a store, for an optimizer that is set on it.
class WeakStore final : public c10::intrusive_ptr_target {
 public:
  explicit WeakStore(const BoundStore& store) : store_(store.pointer()) {}

  // Null, which is None, if the store no longer exists.
  Self lock() const {
    return store_.lock();
  }

 private:
  c10::weak_intrusive_ptr<KVStore> store_;
};

py::tuple shape(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("shape").key(key);
  return py::tuple(
      py::cast(PythonCalls::without_gil([&] { return self->shape(parsed); })));
}

py::object dtype(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("dtype").key(key);
  const c10::ScalarType type =
      PythonCalls::without_gil([&] { return self->dtype(parsed); });
  return py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(torch::getTHPDtype(type)));
}

void* release_gil() {
  return PyGILState_Check() == 1 ? PyEval_SaveThread() : nullptr;
}

void restore_gil(void* state) {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state));
}

// The store of a Python object, if that is its only owner and if its updater is
// a Python callable without other owners: then Python's garbage collector sees
// every reference of a cycle through them.
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
    const Store* const inner = store->store();
    if (inner == nullptr) {
      return 0; // forked
    }
    inner->visit_sole_updater([&](const OpaqueUpdater& updater) {
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

py::object script_object(const BoundStore& self) {
  return torch::jit::toPyObject(c10::IValue(self.pointer()));
}

Self from_script_object(py::handle object) {
  TORCH_CHECK_TYPE(
      py::isinstance<torch::jit::Object>(object) &&
          py::detail::is_holder_constructed(object.ptr()),
      "from_script_object: expected a torch.ScriptObject, but got ",
      PythonObjects::type_name(object));
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
  main_thread = py::module_::import("threading")
                    .attr("main_thread")()
                    .attr("ident")
                    .cast<unsigned long>();
  set_signal_check(&raise_signals);
  find_fx_tracing();

  // Python passes all arguments by position. Only those that it may leave out,
  // or that users see in an error, have names.
  m.def("did_you_mean", &did_you_mean);
  m.def("register_store", &register_python_store);
  m.def("set_zeromq_library", &dist::set_zeromq_library);
  dist::set_default_group(&default_group);
  m.def(
      "close_all",
      [] { dist::Node::close_all(dist::Node::kExitTimeout); },
      py::call_guard<py::gil_scoped_release>());
  m.def("byte_counts", &dist::snapshot_of_byte_counts);
  py::class_<Work, WorkPtr>(
      m,
      "Work",
      "The work of a call with async_op=True, as in torch.distributed.\n\n"
      "On accelerators the call enqueues its work on the store's streams.\n"
      "Until wait(), do not overwrite pushed tensors or use the outs; freeing\n"
      "them is safe. On the CPU the work is done when the call returns.\n"
      "Thread-safe.")
      .def(
          "wait",
          &released<&Work::wait, Work>,
          "Makes the calling thread's current streams wait for the work.\n\n"
          "Does not block the host. May be called again, also on other\n"
          "streams.")
      .def(
          "is_completed",
          &released<&Work::is_completed, Work>,
          "Whether the work is done; False if captured into a CUDA graph.")
      .def(
          "get_future",
          [](const Bound<Work>& self) {
            return std::make_shared<torch::jit::PythonFutureWrapper>(
                PythonCalls::without_gil([&] { return self->get_future(); }));
          },
          "A torch.Future, as those of torch.distributed.\n\n"
          "On accelerators it is done at once, with the call's tensors there as\n"
          "its value: the current streams of who waits for it wait. Elsewhere\n"
          "it is done with the work, with an empty list or an error, and its\n"
          "callbacks then run on another thread.")
      .def("__repr__", &released<&Work::repr, Work>);
  py::class_<WeakStore, c10::intrusive_ptr<WeakStore>>(m, "WeakKVStore")
      .def("lock", [](const Bound<WeakStore>& self) { return self->lock(); });
  py::class_<KVStore, Self> kvstore(
      m, "KVStore", py::custom_type_setup(&make_collectable));
  define_optimizer(kvstore);
  kvstore
      .def(
          // py::str: a std::string would take bytes, too.
          py::init([](const py::str& type, const py::dict& options) {
            const std::string text = utf8_of("create", "type", type.ptr());
            const StoreOptions parsed = parse_store_options(options);
            const py::gil_scoped_release no_gil;
            return c10::make_intrusive<KVStore>(text, parsed);
          }),
          py::arg("type"),
          py::arg("options") = py::dict())
      .def_property_readonly(
          "type", [](const BoundStore& self) { return self->type(); })
      .def("init", &PythonCalls::init)
      .def("push", &PythonCalls::push)
      .def(
          "pull",
          &PythonCalls::pull,
          py::arg("key"),
          py::arg("out"),
          py::arg("priority"),
          py::arg("ignore_sparse") = true,
          py::arg("async_op") = false,
          py::arg("min_version") = 0)
      .def("pushpull", &PythonCalls::pushpull)
      .def("row_sparse_pull", &PythonCalls::row_sparse_pull)
      .def("broadcast", &PythonCalls::broadcast)
      .def("assign", &PythonCalls::assign)
      .def("init_rows", &init_rows)
      .def(
          "delete",
          &PythonCalls::erase,
          py::arg("key"),
          py::arg("row_ids") = py::none())
      .def("keys", &released<&KVStore::keys>)
      .def("contains", &PythonCalls::contains)
      .def("size", &released<&KVStore::size>)
      .def(
          "version",
          [](const BoundStore& self, py::handle key) {
            const Key parsed = Parser("version").key(key);
            return PythonCalls::without_gil(
                [&] { return self->version(parsed); });
          })
      .def("shape", &shape)
      .def("is_row_sparse", &is_row_sparse)
      .def("num_rows", &num_rows)
      .def("row_device", &row_device)
      .def("dtype", &dtype)
      .def(
          "set_updater",
          &set_updater,
          py::arg("updater"),
          py::arg("sparse") = false)
      .def(
          "weak",
          [](const BoundStore& self) {
            return c10::make_intrusive<WeakStore>(self);
          })
      .def("set_gradient_compression", &set_gradient_compression)
      .def("gradient_compression", &gradient_compression)
      .def_static("check_row_init", &check_row_init)
      .def_static(
          "check_codec",
          [](const std::string& name, const NumbersByName& numbers) {
            return numbers_of(
                make_codec("set_gradient_compression", name, numbers));
          })
      .def("stats", &stats)
      .def("barrier", &released<&KVStore::barrier>)
      .def("flush", &released<&KVStore::flush>)
      .def("rank", &released<&KVStore::rank>)
      .def("num_workers", &released<&KVStore::num_workers>)
      .def("num_dead_node", &released<&KVStore::num_dead_node>)
      .def("repr", &released<&KVStore::repr>)
      .def("close", &released<&KVStore::close>)
      .def(
          "state",
          &state,
          py::arg("with_keys") = true,
          py::arg("with_updater") = true)
      .def("gather_state", &gather_state, py::arg("with_updater") = true)
      .def("own_state", &own_state)
      .def("holds", &holds)
      .def("begin_gather", &begin_gather)
      .def("gather", &gather)
      .def("fail_gather", &fail_gather)
      .def("load", &load)
      .def("restore_compression", &restore_compression)
      .def_static("from_state", &from_state)
      .def_static(
          "canonical_type",
          [](const py::str& type) {
            return canonical_type(utf8_of("create", "type", type.ptr()));
          },
          py::arg("type"))
      .def("take", &take, py::arg("other"), py::arg("keeps_updater") = false)
      .def_static(
          "key_of",
          [](const std::string& op, py::handle object) {
            return Parser(op.c_str()).key(object);
          })
      .def("script_object", &script_object)
      .def_property_readonly(
          "capsule",
          [](const BoundStore& self) { return c10::Capsule(self.pointer()); })
      .def_static(
          "script_class", [] { return c10::getCustomClassType<Self>(); })
      .def_static("from_script_object", &from_script_object);
}

} // namespace torchkv

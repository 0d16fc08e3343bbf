// The TorchScript binding: torch.classes.torchkv.KVStore. Keys and values are
// declared as Any, so that TorchScript code reads like Python.
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/gil.h"
#include "../device/work.h"
#include "../kvstore.h"
#include "../update/script_updater.h"
#include "calls.h"
#include "tracing.h"

namespace torchkv {
namespace {

struct ScriptObjects {
  using Object = c10::IValue;

  static std::optional<Key> as_key(const char* /*op*/, const Object& object) {
    if (object.isInt()) {
      return Key(object.toInt());
    }
    if (object.isString()) {
      return Key(object.toStringRef());
    }
    return std::nullopt;
  }
  static const at::Tensor* as_tensor(const Object& object) {
    return object.isTensor() ? &object.toTensor() : nullptr;
  }
  static bool is_list(const Object& object) {
    return object.isList() || object.isTuple();
  }
  static c10::ArrayRef<Object> items(const Object& object) {
    return object.isList() ? object.toListRef()
                           : object.toTupleRef().elements().asArrayRef();
  }
  static int64_t size(const Object& object) {
    return static_cast<int64_t>(items(object).size());
  }
  static Object item(const Object& object, int64_t i) {
    return items(object)[i];
  }
  static std::string type_name(const Object& object) {
    return object.type()->annotation_str();
  }
  static bool is_none(const Object& object) {
    return object.isNone();
  }
  static void refuse_tracing(const char* op) {
    refuse_graph_capture(op);
  }
  struct Released {}; // TorchScript runs without the GIL

  using Store = c10::intrusive_ptr<KVStore>;
  using Int = int64_t;
  using Bool = bool;
  static CallOptions options(const char* /*op*/, Int priority, Bool async_op) {
    return {priority, async_op};
  }
  static int64_t as_int(const char* /*op*/, const char* /*name*/, Int value) {
    return value;
  }
  static bool as_bool(const char* /*op*/, const char* /*name*/, Bool value) {
    return value;
  }
  using Work = std::optional<WorkPtr>;
  static Work work(WorkPtr work) {
    return work == nullptr ? Work() : std::move(work);
  }
  static c10::IValue result(WorkPtr pointer) {
    return work(std::move(pointer));
  }
  static c10::IValue result(std::vector<at::Tensor> tensors, bool single) {
    return single ? c10::IValue(tensors[0]) : c10::IValue(std::move(tensors));
  }
};

using ScriptCalls = Calls<ScriptObjects>;
using Self = c10::intrusive_ptr<KVStore>;
using c10::IValue;

IValue keys(const Self& self) {
  const bool is_str = self->key_kind() == KeyKind::kStr;
  c10::impl::GenericList result(
      is_str ? c10::TypePtr(c10::StringType::get()) : c10::IntType::get());
  for (const auto& key : self->keys()) {
    result.push_back(to_ivalue(key));
  }
  return result;
}

void set_updater(const Self& self, const IValue& updater, bool sparse) {
  if (updater.isNone()) {
    self->set_updater(nullptr);
    return;
  }
  TORCH_CHECK_TYPE(
      updater.isModule(),
      "set_updater: expected None or a scripted submodule, but got ",
      ScriptObjects::type_name(updater));
  self->set_updater(
      std::make_shared<ScriptUpdater>(updater.toModule(), sparse));
}

void set_optimizer(
    const Self& self,
    const std::string& rule,
    const StoreState::Numbers& numbers) {
  self->set_optimizer(rule, from_dict(numbers));
}

void init_rows(
    const Self& self,
    const IValue& key,
    const std::vector<int64_t>& row_shape,
    std::optional<c10::ScalarType> dtype,
    std::optional<int64_t> num_rows,
    const std::string& init,
    const std::optional<StoreState::Numbers>& numbers,
    int64_t seed) {
  ScriptCalls::init_rows(
      self,
      key,
      row_shape,
      dtype.value_or(c10::kFloat),
      num_rows,
      make_row_init(
          "init_rows",
          init,
          numbers ? from_dict(*numbers) : NumbersByName(),
          seed));
}

void set_gradient_compression(
    const Self& self,
    const std::string& type,
    const StoreState::Numbers& options) {
  self->set_gradient_compression(type, from_dict(options));
}

// What torch.jit.save writes: PyTorch's reader does not compare the archive's
// own checksums.
using Archive = std::tuple<StoreState::Tuple, int64_t>;

Archive to_archive(const KVStore& store) {
  StoreState state = store.state();
  const int64_t checksum = state.checksum();
  return {std::move(state).to_tuple(), checksum};
}

Self from_archive(Archive archive) {
  StoreState state = StoreState::from_tuple(std::move(std::get<0>(archive)));
  TORCH_CHECK_VALUE(
      state.checksum() == std::get<1>(archive),
      "load: the archive is damaged: its checksum differs");
  return KVStore::from_state(std::move(state));
}

} // namespace

TORCH_LIBRARY(torchkv, m) {
  using torch::arg;
  const arg key("key");
  const arg value("value");
  const arg out("out");
  const arg no_out = arg("out") = arg::none();
  const arg priority = arg("priority") = 0;
  const arg ignore_sparse = arg("ignore_sparse") = true;
  const arg async_op = arg("async_op") = false;
  const arg share = arg("share") = false;
  m.class_<Work>("Work")
      .def("wait", &Work::wait)
      .def("is_completed", &Work::is_completed)
      .def("__repr__", &Work::repr)
      .def("__str__", &Work::repr);
  m.class_<KVStore>("KVStore")
      .def(
          torch::init([](const std::string& type) {
            return c10::make_intrusive<KVStore>(type);
          }),
          "",
          {arg("type") = "local"})
      .def("type", [](const Self& self) { return self->type(); })
      .def(
          "init",
          &ScriptCalls::init,
          "",
          {key, value, arg("whole") = false, share})
      .def("push", &ScriptCalls::push, "", {key, value, priority, async_op})
      .def(
          "pull",
          &ScriptCalls::pull,
          "",
          {key,
           no_out,
           priority,
           ignore_sparse,
           async_op,
           arg("min_version") = 0})
      .def(
          "pushpull",
          &ScriptCalls::pushpull,
          "",
          {key, value, no_out, priority, async_op})
      .def(
          "broadcast",
          &ScriptCalls::broadcast,
          "",
          {key, value, out, priority, async_op})
      .def(
          "row_sparse_pull",
          &ScriptCalls::row_sparse_pull,
          "",
          {key, no_out, priority, arg("row_ids") = arg::none()})
      .def("assign", &ScriptCalls::assign, "", {key, value, share})
      .def(
          "init_rows",
          &init_rows,
          "",
          {key,
           arg("row_shape"),
           arg("dtype") = arg::none(),
           arg("num_rows") = arg::none(),
           arg("init") = "zeros",
           arg("numbers") = arg::none(),
           arg("seed") = 0})
      .def(
          "delete",
          &ScriptCalls::erase,
          "",
          {key, arg("row_ids") = arg::none()})
      .def(
          "version",
          [](const Self& self, const IValue& key) {
            return self->version(
                ArgumentParser<ScriptObjects>("version").key(key));
          },
          "",
          {key})
      .def(
          "num_rows",
          [](const Self& self, const IValue& key) {
            return self->num_rows(
                ArgumentParser<ScriptObjects>("num_rows").key(key));
          },
          "",
          {key})
      .def("keys", &keys)
      .def("__contains__", &ScriptCalls::contains, "", {key})
      .def("__len__", &KVStore::size)
      .def("__repr__", &KVStore::repr)
      .def("__str__", &KVStore::repr)
      .def(
          "set_updater",
          &set_updater,
          "",
          {arg("updater"), arg("sparse") = false})
      .def("set_optimizer", &set_optimizer, "", {arg("rule"), arg("numbers")})
      .def(
          "set_gradient_compression",
          &set_gradient_compression,
          "",
          {arg("type"), arg("options")})
      .def("rank", &KVStore::rank)
      .def("num_workers", &KVStore::num_workers)
      .def("num_dead_node", &KVStore::num_dead_node)
      .def("barrier", &KVStore::barrier)
      .def("close", &KVStore::close)
      .def_pickle(
          // PyTorch calls these with the GIL held.
          [](const Self& self) {
            const ReleaseGil no_gil;
            return to_archive(*self);
          },
          [](Archive archive) {
            const ReleaseGil no_gil;
            return from_archive(std::move(archive));
          });
}

} // namespace torchkv

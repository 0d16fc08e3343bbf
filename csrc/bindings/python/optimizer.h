#pragma once

#include <ATen/OpMathType.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../../core/text.h"
#include "objects.h"
#include "updater.h"

namespace torchkv {

// The functions bound as methods of torchkv._C.KVStore that concern its
// optimizer.

// `options`: key -> (group, lr_mult, wd_mult).
inline uint64_t set_optimizer(
    const BoundStore& self,
    const std::string& rule,
    const std::vector<NumbersByName>& groups,
    const py::dict& options,
    const NumbersByName& shared,
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
    optimizer.keys[parser.key(key)] = {group, lr_mult, wd_mult};
  }
  set_shared_numbers(op, optimizer, shared);
  const py::gil_scoped_release no_gil;
  // Python checks the keys, because its messages name another operation.
  return self->set_optimizer(
      std::move(optimizer), keep_state, /*check_keys=*/false);
}

inline void expect_keys(const BoundStore& self, const py::list& list) {
  const Parser parser("expect_keys");
  Keys keys;
  for (const auto& key : list) {
    keys.list.push_back(parser.key(key));
  }
  const py::gil_scoped_release no_gil;
  self->expect_keys(keys);
}

// A built-in optimizer as its generation and the arguments of set_optimizer; a
// Python callable unchanged; None for any other updater.
inline py::object optimizer(const BoundStore& self) {
  const Updater updater =
      PythonCalls::without_gil([&] { return self->current_updater(); });
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
    options[py::cast(key)] =
        py::make_tuple(option.group, option.lr_mult, option.wd_mult);
  }
  return py::make_tuple(
      optimizer.generation,
      optimizer.name(),
      groups,
      options,
      shared_numbers(optimizer));
}

inline py::list optimizer_states(const BoundStore& self, py::handle key) {
  const Keys keys = Parser("optimizer_states").keys(key);
  const auto states =
      PythonCalls::without_gil([&] { return self->optimizer_states(keys); });
  py::list result;
  for (const auto& state : states) {
    py::dict item;
    item["step"] = state.step;
    item["num_accumulated"] = state.num_accumulated;
    for (const auto& [name, tensor] : state.tensors) {
      item[py::str(name)] = py::cast(tensor);
    }
    result.append(item);
  }
  return result;
}

inline void set_optimizer_states(
    const BoundStore& self,
    py::handle key,
    const std::vector<py::dict>& items) {
  constexpr auto* op = "set_optimizer_states";
  const Parser parser(op);
  // None: a rank of several makes the call all the same.
  const Keys keys = items.empty() ? Keys() : parser.keys(key);
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
        const at::Tensor* tensor = PythonObjects::as_tensor(value);
        TORCH_CHECK_TYPE(
            tensor != nullptr,
            op,
            ": expected a tensor as ",
            quoted(text),
            ", but got ",
            PythonObjects::type_name(value));
        state.tensors.emplace(text, *tensor);
      }
    }
    states.push_back(std::move(state));
  }
  const py::gil_scoped_release no_gil;
  self->set_optimizer_states(keys, states);
  states.clear(); // releases tensors without the GIL
}

// The names of the tensors that a rule keeps for each key.
inline std::vector<std::string> names_of_states(
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

template <class Class>
void define_optimizer(Class& kvstore) {
  kvstore.def("set_optimizer", &set_optimizer)
      .def("optimizer", &optimizer)
      .def("expect_keys", &expect_keys)
      .def("expected_keys", &released<&KVStore::expected_keys>)
      .def("num_skipped", &released<&KVStore::num_skipped>)
      .def("num_steps", &released<&KVStore::num_steps>)
      .def("grad_norm", &released<&KVStore::grad_norm>)
      .def("optimizer_states", &optimizer_states)
      .def("set_optimizer_states", &set_optimizer_states)
      .def_static("state_names", &names_of_states)
      .def_static("state_dtype", &at::toOpMathType)
      .def_static(
          "check_optimizer",
          [](const std::string& op,
             const std::string& rule,
             const NumbersByName& numbers) {
            check_optimizer(
                op.c_str(), make_optimizer(op.c_str(), rule, numbers));
          })
      .def_static(
          "scheduled_rate",
          [](const std::string& op,
             const NumbersByName& numbers,
             int64_t num_updates) {
            return make_schedule(op.c_str(), numbers).rate(num_updates);
          });
}

} // namespace torchkv

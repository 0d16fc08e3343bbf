#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <utility>
#include <vector>

#include "../../kvstore.h"
#include "bound.h"
#include "objects.h"

namespace torchkv {

// Through IValues: pybind11 does not convert c10::Dict.
inline py::object state(
    const BoundStore& self,
    py::handle with_keys_object,
    py::handle with_updater_object) {
  const bool with_keys = as_bool("state", "with_keys", with_keys_object);
  const bool with_updater =
      as_bool("state", "with_updater", with_updater_object);
  return torch::jit::toPyObject(PythonCalls::without_gil([&] {
    return c10::IValue(self->state(with_keys, with_updater).to_tuple());
  }));
}

inline bool holds(const BoundStore& self, py::handle key) {
  const Key parsed = Parser("holds").key(key);
  return PythonCalls::without_gil([&] { return self->holds(parsed); });
}

// For all ranks of a store on several machines, as the next three.
inline py::object gather_state(
    const BoundStore& self,
    py::handle with_updater_object) {
  const bool with_updater =
      as_bool("gather_state", "with_updater", with_updater_object);
  return torch::jit::toPyObject(PythonCalls::without_gil([&] {
    return c10::IValue(self->gather_state(with_updater).to_tuple());
  }));
}

inline py::tuple own_state(const BoundStore& self) {
  std::vector<int64_t> begins;
  std::vector<std::tuple<Key, int64_t, at::Tensor>> residuals;
  py::object state = torch::jit::toPyObject(PythonCalls::without_gil([&] {
    OwnState own = self->own_state();
    begins = std::move(own.begins);
    residuals = std::move(own.residuals);
    return c10::IValue(std::move(own.state).to_tuple());
  }));
  return py::make_tuple(
      std::move(state), std::move(begins), std::move(residuals));
}

inline std::vector<at::Tensor> gather(
    const BoundStore& self,
    const std::string& op,
    int64_t stage,
    const at::Tensor& bytes,
    bool to_all) {
  const py::gil_scoped_release no_gil;
  return self->gather(op, stage, bytes, to_all);
}

inline void begin_gather(const BoundStore& self, const std::string& op) {
  const py::gil_scoped_release no_gil;
  self->begin_gather(op);
}

inline void fail_gather(const BoundStore& self, const std::string& text) {
  const py::gil_scoped_release no_gil;
  self->fail_gather(text);
}

inline StoreState state_of(const py::object& object) {
  c10::IValue state =
      torch::jit::toIValue(object, c10::getTypePtr<StoreState::Tuple>());
  const py::gil_scoped_release no_gil;
  return StoreState::from_tuple(
      std::exchange(state, c10::IValue()).to<StoreState::Tuple>());
}

inline void load(const BoundStore& self, const py::object& object) {
  StoreState state = state_of(object);
  const py::gil_scoped_release no_gil;
  self->load(std::move(state));
}

inline void restore_compression(
    const BoundStore& self,
    const py::object& object) {
  const StoreState state = state_of(object);
  const py::gil_scoped_release no_gil;
  self->restore_compression(state);
}

inline Self from_state(const py::object& object) {
  StoreState state = state_of(object);
  const py::gil_scoped_release no_gil;
  return KVStore::from_state(std::move(state));
}

inline void take(
    const BoundStore& self,
    const BoundStore& other,
    py::handle keeps_updater_object) {
  const bool keeps_updater =
      as_bool("take", "keeps_updater", keeps_updater_object);
  const py::gil_scoped_release no_gil;
  self->take(*other, keeps_updater);
}

} // namespace torchkv

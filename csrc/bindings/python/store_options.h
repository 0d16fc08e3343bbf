#pragma once

#include <torch/csrc/utils/pybind.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../../core/text.h"
#include "../../dist/rendezvous.h"
#include "../../store/options.h"
#include "../../store/registry.h"
#include "objects.h"

namespace torchkv {

// Takes a name for a type that only Python has.
inline void register_python_store(const std::string& name) {
  register_store(
      name,
      [name](Runtime& /*runtime*/, const StoreOptions& /*options*/)
          -> std::unique_ptr<Store> {
        TORCH_CHECK_NOT_IMPLEMENTED(
            false,
            "create: the store type ",
            quoted(name),
            " is a Python class; torchkv.create makes it");
      });
}

inline std::string option_text(const char* name, py::handle object) {
  TORCH_CHECK_TYPE(
      PyUnicode_Check(object.ptr()) != 0,
      "create: expected a str as ",
      name,
      ", but got ",
      PythonObjects::type_name(object));
  return utf8_of("create", name, object.ptr());
}

inline double option_seconds(const char* name, py::handle object) {
  const double value = PyFloat_Check(object.ptr()) != 0 ||
          (PyLong_Check(object.ptr()) != 0 && PyBool_Check(object.ptr()) == 0)
      ? PyFloat_AsDouble(object.ptr())
      : std::numeric_limits<double>::quiet_NaN();
  TORCH_CHECK_VALUE(
      std::isfinite(value) && value > 0,
      "create: expected a positive number of seconds as ",
      name,
      ", but got ",
      py::repr(object).cast<std::string>());
  return value;
}

inline std::string option_path(const char* name, py::handle object) {
  return option_text(name, py::module_::import("os").attr("fspath")(object));
}

// "100 rounds" or "30s"
inline void parse_snapshot_every(
    const std::string& text,
    StoreOptions& options) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const bool is_rounds = unit == " rounds" || unit == " round";
  TORCH_CHECK_VALUE(
      number > 0 && std::isfinite(number) && (is_rounds || unit == "s") &&
          (!is_rounds || number == std::floor(number)),
      "create: expected '100 rounds' or '30s' as snapshot_every, but got ",
      quoted(text));
  if (is_rounds) {
    options.snapshot_rounds = static_cast<int64_t>(number);
  } else {
    options.snapshot_seconds = number;
  }
}

inline int64_t option_int(const char* name, py::handle object) {
  TORCH_CHECK_TYPE(
      PyLong_Check(object.ptr()) != 0 && PyBool_Check(object.ptr()) == 0,
      "create: expected an int as ",
      name,
      ", but got ",
      PythonObjects::type_name(object));
  return object.cast<int64_t>();
}

// The options of torchkv.create by name; None leaves one out.
inline StoreOptions parse_store_options(const py::dict& options) {
  StoreOptions result;
  for (const auto& [name_object, value] : options) {
    const auto name = name_object.cast<std::string>();
    if (value.is_none()) {
      continue;
    }
    if (name == "name") {
      result.name = option_text("name", value);
    } else if (name == "rank") {
      result.rank = option_int("rank", value);
    } else if (name == "world_size") {
      result.world_size = option_int("world_size", value);
    } else if (name == "store") {
      TORCH_CHECK_TYPE(
          py::isinstance<c10d::Store>(value),
          "create: expected a torch.distributed.Store as store, but got ",
          PythonObjects::type_name(value));
      result.rendezvous =
          dist::make_rendezvous(value.cast<c10::intrusive_ptr<c10d::Store>>());
    } else if (name == "timeout") {
      result.timeout = option_seconds("timeout", value);
    } else if (name == "heartbeat") {
      result.heartbeat = option_seconds("heartbeat", value);
    } else if (name == "security") {
      result.security = option_text("security", value);
    } else if (name == "snapshot_dir") {
      result.snapshot_dir = option_path("snapshot_dir", value);
    } else if (name == "snapshot_every") {
      parse_snapshot_every(option_text("snapshot_every", value), result);
    } else {
      static const std::vector<std::string> known = {
          "name",
          "rank",
          "world_size",
          "store",
          "timeout",
          "heartbeat",
          "security",
          "snapshot_dir",
          "snapshot_every"};
      TORCH_CHECK_VALUE(
          false,
          "create: unknown option ",
          quoted(name),
          "; expected one of ",
          listed(known),
          did_you_mean(name, known));
    }
  }
  TORCH_CHECK_VALUE(
      result.snapshot_dir.empty() ==
          (result.snapshot_rounds == 0 && result.snapshot_seconds == 0),
      "create: expected snapshot_dir and snapshot_every together");
  return result;
}

} // namespace torchkv

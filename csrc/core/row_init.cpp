#include "row_init.h"

#include <c10/util/Exception.h>

#include <array>
#include <cmath>
#include <vector>

#include "text.h"

namespace torchkv {
namespace {

struct InitInfo {
  RowInit::Id id;
  const char* name;
  std::array<const char*, 2> numbers; // null where it has none
};

constexpr std::array<InitInfo, 3> kInits{{
    {RowInit::Id::kZeros, "zeros", {}},
    {RowInit::Id::kNormal, "normal", {"mean", "std"}},
    {RowInit::Id::kUniform, "uniform", {"low", "high"}},
}};

const InitInfo& init_info(RowInit::Id id) {
  return kInits.at(static_cast<size_t>(id));
}

const InitInfo& find_init(const char* op, const std::string& name) {
  std::vector<std::string> names;
  for (const auto& info : kInits) {
    if (name == info.name) {
      return info;
    }
    names.emplace_back(info.name);
  }
  TORCH_CHECK_VALUE(
      false,
      op,
      ": unknown initial value of rows ",
      quoted(name),
      "; expected one of ",
      listed(names),
      did_you_mean(name, names));
}

// The member that a name stands for.
double& number_of(RowInit& init, const std::string& name) {
  return name == "mean" ? init.mean
      : name == "std"   ? init.std
      : name == "low"   ? init.low
                        : init.high;
}

} // namespace

RowInit make_row_init(
    const char* op,
    const std::string& name,
    const NumbersByName& numbers,
    int64_t seed) {
  const InitInfo& info = find_init(op, name);
  RowInit init;
  init.id = info.id;
  init.seed = seed;
  for (const auto& [given, value] : numbers) {
    bool is_known = false;
    for (const char* known : info.numbers) {
      is_known = is_known || (known != nullptr && given == known);
    }
    TORCH_CHECK_VALUE(
        is_known,
        op,
        ": unexpected number ",
        quoted(given),
        " for initial value '",
        info.name,
        "' of rows");
    TORCH_CHECK_VALUE(
        std::isfinite(value),
        op,
        ": expected a finite ",
        given,
        " of the initial value of rows, but got ",
        value);
    number_of(init, given) = value;
  }
  TORCH_CHECK_VALUE(
      init.std >= 0,
      op,
      ": expected a std of at least 0 for the initial value of rows, but got ",
      init.std);
  TORCH_CHECK_VALUE(
      init.low <= init.high && std::isfinite(init.high - init.low),
      op,
      ": expected low to be at most high, and their difference to be finite, "
      "for the initial value of rows, but got ",
      init.low,
      " and ",
      init.high);
  return init;
}

NumbersByName numbers_of(const RowInit& init) {
  RowInit copy = init;
  NumbersByName numbers;
  for (const char* name : init_info(init.id).numbers) {
    if (name != nullptr) {
      numbers[name] = number_of(copy, name);
    }
  }
  return numbers;
}

const char* name_of(const RowInit& init) {
  return init_info(init.id).name;
}

} // namespace torchkv

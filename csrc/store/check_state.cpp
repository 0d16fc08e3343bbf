#include "check_state.h"

#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <string>

#include "../core/text.h"
#include "check.h"

namespace torchkv {

void check_optimizable(const char* op, const Entry& entry) {
  const c10::ScalarType dtype = entry.meta.dtype;
  TORCH_CHECK_TYPE(
      c10::isFloatingType(dtype) || c10::isComplexType(dtype),
      op,
      ": expected a stored value of floating-point or complex dtype, as the "
      "store has an optimizer, but got ",
      dtype_name(dtype),
      " ",
      entry.key.context());
}

void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count) {
  constexpr int64_t kMost = 9007199254740992; // 2^53: exact in fp64
  TORCH_CHECK_VALUE(
      count >= 0 && count <= kMost,
      op,
      ": expected ",
      name,
      " to be from 0 to ",
      kMost,
      ", but got ",
      count,
      " ",
      key.context());
}

void check_state(
    const char* op,
    const Entry& entry,
    const RuleSpec& rule,
    const KeyState& state) {
  const Key& key = entry.key;
  const c10::ScalarType dtype = entry.meta.dtype;
  const auto names = state_names(rule);
  if (!state.tensors.empty()) {
    check_optimizable(op, entry);
  }
  const auto arithmetic =
      state.tensors.empty() ? dtype : at::toOpMathType(dtype);
  const auto is_known = [&](const std::string& name) {
    return (name == "master" && arithmetic != dtype) || name == "accumulated" ||
        std::any_of(names.begin(), names.end(), [&](const char* known) {
             return known != nullptr && name == known;
           });
  };
  check_counter(op, key, "step", state.step);
  check_counter(op, key, "num_accumulated", state.num_accumulated);
  TORCH_CHECK_VALUE(
      (state.num_accumulated == 0) == (state.tensors.count("accumulated") == 0),
      op,
      ": expected the state 'accumulated' if and only if num_accumulated is not "
      "0, but got num_accumulated ",
      state.num_accumulated,
      " ",
      key.context());
  for (const auto& [name, tensor] : state.tensors) {
    TORCH_CHECK_VALUE(
        is_known(name),
        op,
        ": unexpected state ",
        quoted(name),
        " for optimizer '",
        name_of(rule),
        "' ",
        key.context());
    check_storable(op, key, tensor);
    check_shape(op, entry, tensor.sizes());
    TORCH_CHECK_VALUE(
        c10::canCast(tensor.scalar_type(), arithmetic),
        op,
        ": expected a state that converts to ",
        dtype_name(arithmetic),
        ", but got ",
        dtype_name(tensor.scalar_type()),
        " ",
        key.context());
  }
  // State of options (AMSGrad, momentum) enabled after the last step does not
  // exist yet.
  RuleSpec plain;
  plain.id = rule.id;
  for (const char* name : state_names(plain)) {
    TORCH_CHECK_VALUE(
        name == nullptr || state.step == 0 || state.tensors.count(name) != 0,
        op,
        ": missing state '",
        name,
        "' ",
        key.context());
  }
}

} // namespace torchkv

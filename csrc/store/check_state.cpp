// Checks of updaters, and of the state of optimizers.
#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <string>

#include "../core/errors.h"
#include "../core/text.h"
#include "check.h"

namespace torchkv {

void check_counter(const Where& where, const char* name, int64_t count) {
  constexpr int64_t kMost = 9007199254740992; // 2^53: exact in fp64
  TORCHKV_CHECK_VALUE(
      count >= 0 && count <= kMost,
      where,
      "expected ",
      name,
      " to be from 0 to ",
      kMost,
      ", but got ",
      count);
}

void check_state(
    const char* op,
    Entry& entry,
    const RuleSpec& rule,
    const KeyState& state,
    std::optional<int64_t> num_rows) {
  const Where where{op, entry.key};
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
  Meta expected = entry.meta;
  if (entry.rows != nullptr) {
    const std::lock_guard lock(entry.mutex);
    expected.sizes[0] = num_rows.value_or(entry.rows->size());
  }
  check_counter(where, "step", state.step);
  check_counter(where, "num_accumulated", state.num_accumulated);
  TORCHKV_CHECK_VALUE(
      (state.num_accumulated == 0) == (state.tensors.count("accumulated") == 0),
      where,
      "expected the state 'accumulated' if and only if num_accumulated is not "
      "0, but got num_accumulated ",
      state.num_accumulated);
  for (const auto& [name, tensor] : state.tensors) {
    TORCHKV_CHECK_VALUE(
        is_known(name),
        where,
        "unexpected state ",
        quoted(name),
        " for optimizer '",
        name_of(rule),
        "'");
    check_storable(where, tensor);
    check_shape(where, expected, tensor.sizes());
    TORCHKV_CHECK_VALUE(
        c10::canCast(tensor.scalar_type(), arithmetic),
        where,
        "expected a state that converts to ",
        dtype_name(arithmetic),
        ", but got ",
        dtype_name(tensor.scalar_type()));
  }
  // State of options (AMSGrad, momentum) enabled after the last step does not
  // exist yet.
  RuleSpec plain;
  plain.id = rule.id;
  for (const char* name : state_names(plain)) {
    TORCHKV_CHECK_VALUE(
        name == nullptr || state.step == 0 || state.tensors.count(name) != 0,
        where,
        "missing state '",
        name,
        "'");
  }
}

void check_steps_rows(
    const char* op,
    const Entry& entry,
    const Updater& updater) {
  if (entry.rows == nullptr) {
    return;
  }
  const Where where{op, entry.key};
  const auto* opaque = std::get_if<std::shared_ptr<OpaqueUpdater>>(&updater);
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      opaque == nullptr || (*opaque)->takes_rows(),
      where,
      "expected an optimizer of torchkv's, or an updater that was set with "
      "sparse=True, as the key is row-sparse, but the updater needs the whole "
      "value");
  if (const auto* optimizer = std::get_if<OptimizerPtr>(&updater)) {
    const RuleSpec rule = (*optimizer)->rule_of(entry.key);
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        needs_only_rows(rule),
        where,
        "expected an optimizer that steps rows by themselves, as the key is "
        "row-sparse, but got '",
        name_of(rule),
        "', which needs the whole value");
  }
}

} // namespace torchkv

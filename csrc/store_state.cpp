#include "store_state.h"

#include <c10/util/Exception.h>

#include <utility>

#include "key.h"

namespace torchkv {
namespace {

constexpr int64_t kFormat = 1;

} // namespace

StoreState::Tuple StoreState::to_tuple() && {
  return {
      kFormat,
      std::move(type),
      std::move(key_kind),
      std::move(int_keys),
      std::move(str_keys),
      std::move(values),
      std::move(versions),
      std::move(updater)};
}

StoreState StoreState::from_tuple(Tuple tuple) {
  TORCH_CHECK_VALUE(
      std::get<0>(tuple) == kFormat,
      "load: expected a store saved in format ",
      kFormat,
      ", but got format ",
      std::get<0>(tuple),
      "; a newer torchkv may read it");
  StoreState state{
      std::move(std::get<1>(tuple)),
      std::move(std::get<2>(tuple)),
      std::move(std::get<3>(tuple)),
      std::move(std::get<4>(tuple)),
      std::move(std::get<5>(tuple)),
      std::move(std::get<6>(tuple)),
      std::move(std::get<7>(tuple))};
  const bool is_int = state.key_kind == name(KeyKind::kInt);
  const bool is_str = state.key_kind == name(KeyKind::kStr);
  const size_t num_keys = state.int_keys.size() + state.str_keys.size();
  TORCH_CHECK_VALUE(
      (is_int || is_str || state.key_kind.empty()) &&
          (is_int || state.int_keys.empty()) &&
          (is_str || state.str_keys.empty()) &&
          state.values.size() == num_keys &&
          state.versions.size() == num_keys && state.updater.size() <= 1,
      "load: expected as many values and versions as keys, all of one kind, but "
      "got ",
      state.int_keys.size(),
      " int keys, ",
      state.str_keys.size(),
      " str keys of kind '",
      state.key_kind,
      "', ",
      state.values.size(),
      " values, ",
      state.versions.size(),
      " versions, ",
      state.updater.size(),
      " updaters");
  return state;
}

} // namespace torchkv

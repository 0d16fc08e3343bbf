#include "state.h"

#include <c10/util/Exception.h>

#include <utility>

#include "../core/key.h"

namespace torchkv {
namespace {

constexpr int64_t kFormat = 4;

StoreState::Numbers to_dict(const NumbersByName& numbers) {
  StoreState::Numbers result;
  for (const auto& [name, value] : numbers) {
    result.insert(name, value);
  }
  return result;
}

// Appends the keys of a map to the lists of their kinds, and visits what they
// have in this order: that of int keys first.
template <class Items, class Visit>
void append_keys(
    const Items& items,
    std::vector<int64_t>& int_keys,
    std::vector<std::string>& str_keys,
    Visit visit) {
  for (const auto kind : {KeyKind::kInt, KeyKind::kStr}) {
    for (const auto& [key, item] : items) {
      if (key.kind() != kind) {
        continue;
      }
      if (kind == KeyKind::kInt) {
        int_keys.push_back(key.id());
      } else {
        str_keys.push_back(key.text());
      }
      visit(item);
    }
  }
}

// The key of item `i` of append_keys.
Key key_at(
    const std::vector<int64_t>& int_keys,
    const std::vector<std::string>& str_keys,
    size_t i) {
  return i < int_keys.size() ? Key(int_keys[i])
                             : Key(str_keys[i - int_keys.size()]);
}

StoreState::OptimizerTuple to_tuple(
    const Optimizer& optimizer,
    std::vector<KeyState> states) {
  StoreState::OptimizerTuple tuple;
  auto& [name, groups, gradient, int_keys, str_keys, group_of, multipliers, steps, accumulated, tensors] =
      tuple;
  name = name_of(optimizer.groups[0]);
  for (const auto& rule : optimizer.groups) {
    groups.push_back(to_dict(numbers_of(rule)));
  }
  gradient = to_dict(shared_numbers(optimizer));
  append_keys(
      optimizer.keys,
      int_keys,
      str_keys,
      [&of_group = group_of,
       &factors = multipliers](const KeyOptions& options) {
        of_group.push_back(static_cast<int64_t>(options.group));
        factors.push_back(options.lr_mult);
        factors.push_back(options.wd_mult);
      });
  for (auto& state : states) {
    steps.push_back(state.step);
    accumulated.push_back(state.num_accumulated);
    StoreState::Tensors dict;
    for (auto& [text, tensor] : state.tensors) {
      dict.insert(text, std::move(tensor));
    }
    tensors.push_back(std::move(dict));
  }
  return tuple;
}

Optimizer to_optimizer(const StoreState::OptimizerTuple& tuple) {
  const auto& [name, groups, gradient, int_keys, str_keys, group_of, multipliers, steps, accumulated, tensors] =
      tuple;
  Optimizer optimizer;
  for (const auto& numbers : groups) {
    optimizer.groups.push_back(make_rule("load", name, from_dict(numbers)));
  }
  set_shared_numbers("load", optimizer, from_dict(gradient));
  const size_t num_keys = int_keys.size() + str_keys.size();
  TORCH_CHECK_VALUE(
      group_of.size() == num_keys && multipliers.size() == 2 * num_keys,
      "load: expected a group and two multipliers for each key with options, but "
      "got ",
      group_of.size(),
      " groups and ",
      multipliers.size(),
      " multipliers for ",
      num_keys,
      " keys");
  for (size_t i = 0; i < num_keys; ++i) {
    optimizer.keys[key_at(int_keys, str_keys, i)] = {
        static_cast<size_t>(group_of[i]),
        multipliers[2 * i],
        multipliers[2 * i + 1]};
  }
  check_optimizer("load", optimizer);
  return optimizer;
}

StoreState::CompressionTuple to_tuple(
    const Compression& compression,
    std::vector<std::vector<at::Tensor>> all_residuals,
    std::vector<int64_t> all_counts) {
  StoreState::CompressionTuple tuple;
  auto& [names, numbers, int_keys, str_keys, group_of, residuals, counts] =
      tuple;
  for (const auto& codec : compression.groups) {
    names.emplace_back(name_of(codec));
    numbers.push_back(to_dict(numbers_of(codec)));
  }
  append_keys(
      compression.keys,
      int_keys,
      str_keys,
      [&of_group = group_of](size_t group) {
        of_group.push_back(static_cast<int64_t>(group));
      });
  residuals = std::move(all_residuals);
  counts = std::move(all_counts);
  return tuple;
}

Compression to_compression(const StoreState::CompressionTuple& tuple) {
  const auto& [names, numbers, int_keys, str_keys, group_of, residuals, counts] =
      tuple;
  const size_t num_keys = int_keys.size() + str_keys.size();
  TORCH_CHECK_VALUE(
      names.size() == numbers.size() && group_of.size() == num_keys,
      "load: expected options of each compression and a group for each of its "
      "keys, but got ",
      names.size(),
      " compressions, ",
      numbers.size(),
      " options, ",
      num_keys,
      " keys and ",
      group_of.size(),
      " groups");
  Compression compression;
  for (size_t i = 0; i < names.size(); ++i) {
    compression.groups.push_back(
        make_codec("load", names[i], from_dict(numbers[i])));
  }
  for (size_t i = 0; i < num_keys; ++i) {
    compression.keys[key_at(int_keys, str_keys, i)] =
        static_cast<size_t>(group_of[i]);
  }
  check_compression("load", compression);
  return compression;
}

StoreState::RowsTuple to_tuple(const std::map<size_t, StoreState::Rows>& rows) {
  StoreState::RowsTuple tuple;
  auto& [keys, ids, num_rows, inits, numbers, seeds] = tuple;
  for (const auto& [key, of_key] : rows) {
    keys.push_back(static_cast<int64_t>(key));
    ids.push_back(of_key.ids);
    num_rows.push_back(of_key.num_rows.value_or(-1));
    inits.emplace_back(name_of(of_key.init));
    numbers.push_back(to_dict(numbers_of(of_key.init)));
    seeds.push_back(of_key.init.seed);
  }
  return tuple;
}

std::map<size_t, StoreState::Rows> to_rows(
    const StoreState::RowsTuple& tuple,
    size_t num_keys) {
  const auto& [keys, ids, num_rows, inits, numbers, seeds] = tuple;
  const size_t count = keys.size();
  std::map<size_t, StoreState::Rows> rows;
  TORCH_CHECK_VALUE(
      ids.size() == count && num_rows.size() == count &&
          inits.size() == count && numbers.size() == count &&
          seeds.size() == count,
      "load: expected ids, a number of rows and an initial value of ",
      count,
      " row-sparse keys, but got ",
      ids.size(),
      ", ",
      num_rows.size(),
      " and ",
      inits.size());
  for (size_t i = 0; i < count; ++i) {
    TORCH_CHECK_VALUE(
        keys[i] >= 0 && static_cast<size_t>(keys[i]) < num_keys,
        "load: expected row-sparse keys among ",
        num_keys,
        " keys, but got number ",
        keys[i]);
    rows[static_cast<size_t>(keys[i])] = {
        ids[i],
        num_rows[i] == -1 ? std::nullopt : std::optional(num_rows[i]),
        make_row_init("load", inits[i], from_dict(numbers[i]), seeds[i])};
  }
  return rows;
}

} // namespace

NumbersByName from_dict(const StoreState::Numbers& numbers) {
  NumbersByName result;
  for (const auto& item : numbers) {
    result[item.key()] = item.value();
  }
  return result;
}

std::optional<KeyKind> StoreState::kind() const {
  if (key_kind.empty()) {
    return std::nullopt;
  }
  return key_kind == name(KeyKind::kInt) ? KeyKind::kInt : KeyKind::kStr;
}

StoreState::Tuple StoreState::to_tuple() && {
  return {
      kFormat,
      std::move(type),
      std::move(key_kind),
      std::move(int_keys),
      std::move(str_keys),
      std::move(values),
      std::move(versions),
      std::move(updater),
      optimizer ? torchkv::to_tuple(*optimizer, std::move(states))
                : OptimizerTuple(),
      compression
          ? torchkv::to_tuple(
                *compression, std::move(residuals), std::move(num_compressed))
          : CompressionTuple(),
      torchkv::to_tuple(rows)};
}

StoreState StoreState::from_tuple(Tuple tuple) {
  TORCH_CHECK_VALUE(
      std::get<0>(tuple) == kFormat,
      "load: expected a store saved in format ",
      kFormat,
      ", but got format ",
      std::get<0>(tuple),
      "; another version of torchkv may read it");
  StoreState state{
      std::move(std::get<1>(tuple)),
      std::move(std::get<2>(tuple)),
      std::move(std::get<3>(tuple)),
      std::move(std::get<4>(tuple)),
      std::move(std::get<5>(tuple)),
      std::move(std::get<6>(tuple)),
      std::move(std::get<7>(tuple)),
      std::nullopt,
      {}};
  auto& optimizer = std::get<8>(tuple);
  if (!std::get<0>(optimizer).empty()) {
    state.optimizer = to_optimizer(optimizer);
    auto& steps = std::get<7>(optimizer);
    auto& accumulated = std::get<8>(optimizer);
    auto& tensors = std::get<9>(optimizer);
    TORCH_CHECK_VALUE(
        steps.size() == state.values.size() &&
            accumulated.size() == steps.size() &&
            tensors.size() == steps.size(),
        "load: expected an optimizer's state of ",
        state.values.size(),
        " keys, but got ",
        steps.size());
    for (size_t i = 0; i < steps.size(); ++i) {
      KeyState key_state{steps[i], accumulated[i], {}};
      for (const auto& item : tensors[i]) {
        key_state.tensors.emplace(item.key(), item.value());
      }
      state.states.push_back(std::move(key_state));
    }
  }
  auto& compression = std::get<9>(tuple);
  if (!std::get<0>(compression).empty()) {
    state.compression = to_compression(compression);
    state.residuals = std::move(std::get<5>(compression));
    state.num_compressed = std::move(std::get<6>(compression));
    TORCH_CHECK_VALUE(
        state.residuals.size() == state.values.size() &&
            state.num_compressed.size() == state.values.size(),
        "load: expected residuals and counts of ",
        state.values.size(),
        " keys, but got ",
        state.residuals.size(),
        " and ",
        state.num_compressed.size());
  }
  state.rows = to_rows(std::get<10>(tuple), state.values.size());
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

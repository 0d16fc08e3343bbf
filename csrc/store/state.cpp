#include "state.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <map>
#include <type_traits>
#include <utility>

#include "../core/checksum.h"
#include "../core/key.h"
#include "../core/plain_dispatch.h"

namespace torchkv {
namespace {

constexpr int64_t kFormat = 2;

StoreState::Numbers to_dict(const NumbersByName& numbers) {
  StoreState::Numbers result;
  for (const auto& [name, value] : numbers) {
    result.insert(name, value);
  }
  return result;
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
  for (const auto kind : {KeyKind::kInt, KeyKind::kStr}) {
    for (const auto& [key, options] : optimizer.keys) {
      if (key.kind() != kind) {
        continue;
      }
      if (kind == KeyKind::kInt) {
        int_keys.push_back(key.id());
      } else {
        str_keys.push_back(key.text());
      }
      group_of.push_back(static_cast<int64_t>(options.group));
      multipliers.push_back(options.lr_mult);
      multipliers.push_back(options.wd_mult);
    }
  }
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
    const Key key = i < int_keys.size() ? Key(int_keys[i])
                                        : Key(str_keys[i - int_keys.size()]);
    optimizer.keys[key] = {
        static_cast<size_t>(group_of[i]),
        multipliers[2 * i],
        multipliers[2 * i + 1]};
  }
  check_optimizer("load", optimizer);
  return optimizer;
}

class Checksum {
 public:
  uint32_t value() const {
    return crc_;
  }

  void add_bytes(const void* data, size_t size) {
    crc_ = crc32(data, size, crc_);
  }
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  void add(T number) {
    add_bytes(&number, sizeof(number));
  }
  void add(const std::string& text) {
    add(text.size());
    add_bytes(text.data(), text.size());
  }
  void add(const at::Tensor& tensor) {
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(tensor.dim());
    for (const int64_t size : tensor.sizes()) {
      add(size);
    }
    const at::Tensor elements = tensor.cpu().contiguous();
    add_bytes(elements.const_data_ptr(), elements.nbytes());
  }
  template <class T>
  void add(const std::vector<T>& items) {
    add(items.size());
    for (const auto& item : items) {
      add(item);
    }
  }
  void add(const NumbersByName& numbers) {
    add(numbers.size());
    for (const auto& [name, number] : numbers) {
      add(name);
      add(number);
    }
  }
  void add(const KeyState& state) {
    add(state.step);
    add(state.num_accumulated);
    for (const auto& [name, tensor] :
         std::map(state.tensors.begin(), state.tensors.end())) {
      add(name);
      add(tensor);
    }
  }
  void add(const Optimizer& optimizer) {
    add(std::string(name_of(optimizer.groups[0])));
    for (const auto& rule : optimizer.groups) {
      add(numbers_of(rule));
    }
    add(shared_numbers(optimizer));
    // Hash tables of equal content may differ in order.
    std::map<std::pair<int64_t, std::string>, KeyOptions> by_key;
    for (const auto& [key, options] : optimizer.keys) {
      const bool is_int = key.kind() == KeyKind::kInt;
      by_key[{is_int ? key.id() : 0, is_int ? "" : key.text()}] = options;
    }
    for (const auto& [key, options] : by_key) {
      add(key.first);
      add(key.second);
      add(options.group);
      add(options.lr_mult);
      add(options.wd_mult);
    }
  }

 private:
  uint32_t crc_ = 0;
};

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
                : OptimizerTuple()};
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

int64_t StoreState::checksum() const {
  const c10::InferenceMode normal_tensors(false);
  const PlainDispatch plain;
  Checksum sum;
  sum.add(type);
  sum.add(key_kind);
  sum.add(int_keys);
  sum.add(str_keys);
  sum.add(values);
  sum.add(versions);
  sum.add(updater);
  if (optimizer) {
    sum.add(*optimizer);
    sum.add(states);
  }
  return sum.value();
}

} // namespace torchkv

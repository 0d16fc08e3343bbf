#include "staging.h"

#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include <unordered_map>
#include <utility>

namespace torchkv::dist {
Staging::Staging(Runtime& runtime, Buffers buffers)
    : buffers_(std::move(buffers)), store_(runtime, store_options(buffers_)) {}

std::vector<Staging::Sum> Staging::sum(
    const Call& call,
    c10::ArrayRef<c10::ScalarType> dtypes) {
  struct Group {
    size_t num_values = 0;
    c10::ScalarType dtype = c10::ScalarType::Undefined; // of all values
    c10::ScalarType stored = c10::ScalarType::Undefined;
    c10::SmallVector<int64_t, 4> sizes;
  };
  std::vector<Sum> sums;
  std::unordered_map<Key, Group, KeyHash> groups;
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const Key& key = call.keys.list[i];
    Group& group = groups[key];
    if (group.num_values == 0) {
      sums.push_back({key, {}});
      group.stored = dtypes[i];
    }
    for (const auto& value : call.values->of(static_cast<int64_t>(i))) {
      group.dtype = group.num_values == 0
          ? value.scalar_type()
          : c10::promoteTypes(group.dtype, value.scalar_type());
      group.sizes.assign(value.sizes().begin(), value.sizes().end());
      ++group.num_values;
    }
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [key, group] : groups) {
    const c10::ScalarType dtype = group.num_values == 1
        ? group.dtype
        : at::toOpMathType(c10::promoteTypes(group.dtype, group.stored));
    const auto meta = store_.meta(call.op, key);
    if (meta && (meta->dtype != dtype || meta->sizes != group.sizes)) {
      store_.erase(key);
    }
    if (!meta || meta->dtype != dtype || meta->sizes != group.sizes) {
      const Tensors value(buffers_.empty(group.sizes, dtype));
      store_.insert({call.op, key, &value});
    }
  }
  store_.merge({call.op, call.keys, call.values});
  for (auto& sum : sums) {
    sum.value = store_.lease(sum.key).first;
  }
  return sums;
}

void Staging::erase(const Keys& keys) {
  const std::lock_guard lock(mutex_);
  for (const auto& key : keys.list) {
    if (store_.meta("delete", key)) {
      store_.erase(key);
    }
  }
}

} // namespace torchkv::dist

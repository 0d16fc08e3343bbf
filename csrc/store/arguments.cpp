#include "arguments.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <sstream>
#include <utility>

namespace torchkv {
namespace {

// Below this many keys comparing all pairs is faster than hashing.
constexpr size_t kFewKeys = 8;

bool has_repeats(const Entries& entries) {
  // Most calls name their keys in the order of init.
  bool ascending = true;
  for (size_t i = 1; i < entries.size() && ascending; ++i) {
    ascending = entries[i - 1]->ordinal < entries[i]->ordinal;
  }
  if (ascending) {
    return false;
  }
  if (entries.size() <= kFewKeys) {
    for (size_t i = 1; i < entries.size(); ++i) {
      if (std::find(entries.begin(), entries.begin() + i, entries[i]) !=
          entries.begin() + i) {
        return true;
      }
    }
    return false;
  }
  ska::flat_hash_set<const Entry*> seen;
  seen.reserve(entries.size());
  return std::any_of(entries.begin(), entries.end(), [&](const EntryPtr& e) {
    return !seen.insert(e.get()).second;
  });
}

} // namespace

std::string Keys::context() const {
  constexpr int64_t kShown = 3;
  if (size() == 1) {
    return list[0].context();
  }
  std::ostringstream out;
  out << "(keys ";
  for (int64_t i = 0; i < std::min(size(), kShown); ++i) {
    out << (i == 0 ? "" : ", ") << list[i];
  }
  if (size() > kShown) {
    out << ", ... " << size() << " in all";
  }
  out << ')';
  return out.str();
}

Tensors::Tensors(std::vector<std::vector<at::Tensor>> groups) {
  for (auto& group : groups) {
    for (auto& tensor : group) {
      flat.push_back(std::move(tensor));
    }
    end_group();
  }
}

Tensors Tensors::replicas(at::TensorList tensors) {
  Tensors result;
  result.flat.append(tensors.begin(), tensors.end());
  result.end_group();
  return result;
}

Tensors Tensors::one_each(at::TensorList tensors) {
  Tensors result;
  for (const auto& tensor : tensors) {
    result.append(tensor);
    result.end_group();
  }
  return result;
}

std::optional<Tensors> merge_repeats(Entries& entries, const Tensors& tensors) {
  if (!has_repeats(entries)) {
    return std::nullopt;
  }
  ska::flat_hash_map<const Entry*, size_t> group_of;
  Entries distinct;
  std::vector<std::vector<at::Tensor>> groups;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto [it, inserted] =
        group_of.emplace(entries[i].get(), groups.size());
    if (inserted) {
      distinct.push_back(entries[i]);
      groups.emplace_back();
    }
    const auto more = tensors.of(static_cast<int64_t>(i));
    auto& group = groups[it->second];
    group.insert(group.end(), more.begin(), more.end());
  }
  entries = std::move(distinct);
  return Tensors(std::move(groups));
}

} // namespace torchkv

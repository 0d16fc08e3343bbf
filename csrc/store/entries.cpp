#include "entries.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>
#include <vector>

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

std::optional<Tensors> merge_repeats(Entries& entries, const Tensors& tensors) {
  if (!has_repeats(entries)) {
    return std::nullopt;
  }
  ska::flat_hash_map<const Entry*, size_t> group_of;
  Entries distinct;
  std::vector<std::vector<int64_t>> groups; // of indices in tensors.flat
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto [it, inserted] =
        group_of.emplace(entries[i].get(), groups.size());
    if (inserted) {
      distinct.push_back(entries[i]);
      groups.emplace_back();
    }
    const auto number = static_cast<int64_t>(i);
    for (int64_t j = tensors.begin(number); j < tensors.ends[i]; ++j) {
      groups[it->second].push_back(j);
    }
  }
  entries = std::move(distinct);
  Tensors merged;
  for (const auto& group : groups) {
    for (const int64_t j : group) {
      merged.append(tensors.flat[j]);
      if (!tensors.encodings.empty()) {
        merged.encodings.push_back(tensors.encodings[static_cast<size_t>(j)]);
      }
    }
    merged.end_group();
  }
  return merged;
}

} // namespace torchkv

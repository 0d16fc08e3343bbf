#include "list_plan.h"

#include <algorithm>
#include <map>
#include <unordered_set>
#include <utility>

namespace torchkv::dist {
namespace {

constexpr int64_t kMaxValueBytes = 4095; // of one that is small
// Of a list, so that it fits into one frame, and its keys into a message in
// shared memory (MemoryLinks).
constexpr int64_t kMaxListBytes = 1'048'576;
constexpr size_t kMaxNameBytes = size_t{32} << 10U;

bool is_small(const Entry& entry) {
  const int64_t size = entry.meta.num_bytes();
  return entry.rows == nullptr && size > 0 && size <= kMaxValueBytes;
}

// A list in the making.
struct Open {
  std::vector<SliceList::Part> parts;
  std::vector<size_t> numbers;
  std::vector<Meta> metas;
  int64_t num_bytes = 0;
  size_t num_name_bytes = 0;
};

ListPlanPtr plan_of(const Entries& entries, ListPlans::ServerOf server_of) {
  std::unordered_set<const Entry*> seen;
  for (const auto& entry : entries) {
    if (!seen.insert(entry.get()).second) {
      return nullptr; // merged first
    }
  }
  auto plan = std::make_shared<ListPlan>();
  using Of = std::pair<int32_t, c10::ScalarType>; // server, dtype
  std::map<Of, Open> open;
  const auto close = [&](const Of& of, Open& list) {
    if (list.parts.size() > 1) {
      plan->lists.push_back(
          {std::make_shared<const SliceList>(std::move(list.parts)),
           std::move(list.numbers),
           std::move(list.metas),
           of.second});
    } else {
      plan->rest.insert(
          plan->rest.end(), list.numbers.begin(), list.numbers.end());
    }
    list = Open();
  };
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry& entry = *entries[i];
    const auto server = is_small(entry) ? server_of(entry) : std::nullopt;
    if (!server) {
      plan->rest.push_back(i);
      continue;
    }
    const Of of{*server, entry.meta.dtype};
    Open& list = open[of];
    const size_t name = SliceList::num_bytes_of(entry.key);
    if (list.num_bytes + entry.meta.num_bytes() > kMaxListBytes ||
        list.num_name_bytes + name > kMaxNameBytes) {
      close(of, list);
    }
    list.parts.push_back({entry.key, entry.meta.num_elements});
    list.numbers.push_back(i);
    list.metas.push_back(entry.meta);
    list.num_bytes += entry.meta.num_bytes();
    list.num_name_bytes += name;
  }
  for (auto& [of, list] : open) {
    close(of, list);
  }
  if (plan->lists.empty()) {
    return nullptr;
  }
  std::sort(
      plan->lists.begin(), plan->lists.end(), [](const auto& a, const auto& b) {
        return a.numbers[0] < b.numbers[0];
      });
  std::sort(plan->rest.begin(), plan->rest.end());
  return plan;
}

} // namespace

ListPlanPtr ListPlans::of(const Entries& entries, ServerOf server_of) {
  constexpr size_t kKept = 64;
  const auto num_small =
      std::count_if(entries.begin(), entries.end(), [](const auto& entry) {
        return is_small(*entry);
      });
  if (num_small < 2) {
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
        return known.entries.size() == entries.size() &&
            std::equal(entries.begin(), entries.end(), known.entries.begin());
      });
  if (found != known_.end()) {
    std::rotate(known_.begin(), found, std::next(found));
    return known_[0].plan;
  }
  if (known_.size() == kKept) {
    known_.pop_back();
  }
  known_.insert(known_.begin(), {entries, plan_of(entries, server_of)});
  return known_[0].plan;
}

void ListPlans::clear() {
  const std::lock_guard lock(mutex_);
  known_.clear();
}

} // namespace torchkv::dist

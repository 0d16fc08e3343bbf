// Values of a DistStore that travel together.
#include <algorithm>
#include <cstring>
#include <utility>

#include "../store/check.h"
#include "byte_counts.h"
#include "dist_store.h"

namespace torchkv::dist {

ListPlanPtr DistStore::plan_of(
    const Call& call,
    const Entries& entries,
    bool are_usual) {
  // Values are copied as they are, one of each key.
  if (call.values != nullptr && !(are_usual && call.values->has_one_each())) {
    return nullptr;
  }
  return plans_.of(entries, [&](const Entry& entry) {
    const std::vector<Place> places = places_of(entry);
    return places.size() == 1 ? std::optional(places[0].server) : std::nullopt;
  });
}

void DistStore::add_lists(
    const ListPlan& plan,
    const Call& call,
    Request& request) const {
  for (const auto& list : plan.lists) {
    Request::Item item;
    item.list = list.slices;
    item.key = item.list->parts()[0].key;
    item.priority = call.options.priority;
    if (call.values == nullptr) {
      item.min_version = std::max<int64_t>(0, call.options.min_version);
      request.items.push_back(std::move(item));
      continue;
    }
    const at::Tensor values =
        staging_.buffers().empty_codes(list.num_bytes()); // of varying sizes
    auto* to = static_cast<std::byte*>(values.mutable_data_ptr());
    for (const size_t i : list.numbers) {
      const at::Tensor& value =
          call.values->flat[call.values->begin(static_cast<int64_t>(i))];
      const size_t size = value.nbytes();
      std::memcpy(to, value.const_data_ptr(), size);
      to += size;
    }
    byte_counts().summed += list.num_bytes();
    byte_counts().listed += list.num_bytes();
    item.value = blob_of(values);
    item.dtype = static_cast<int32_t>(list.dtype);
    item.item_bytes = static_cast<int32_t>(c10::elementSize(list.dtype));
    request.items.push_back(std::move(item));
  }
}

DistStore::RestOfCall::RestOfCall(
    const ListPlan& plan,
    const Call& call,
    const Entries& all) {
  keys.single = false;
  for (const size_t i : plan.rest) {
    keys.list.push_back(call.keys.list[i]);
    entries.push_back(all[i]);
    for (const auto& value : call.values->of(static_cast<int64_t>(i))) {
      values.append(value);
    }
    values.end_group();
  }
}

} // namespace torchkv::dist

// Operations on lists of slices: how they come together, and apart.
#include <algorithm>
#include <utility>

#include "worker.h"

namespace torchkv::dist {

// Makes items on single keys of the lists for which there are no operations.
void Worker::take_apart_items(Request& request) {
  std::vector<Request::Item> items;
  bool is_changed = false;
  for (size_t i = 0; i < request.items.size(); ++i) {
    auto& item = request.items[i];
    // A pull alone does not join: where all pushes are apart, so is it.
    const bool may_join = item.list && !request.two_phase &&
        item.has_list_value() &&
        (request.kind != Request::Kind::kPull || is_joined(*item.list));
    const bool is_apart = item.list && !(may_join && join(item.list));
    if (is_apart && !std::exchange(is_changed, true)) {
      items.assign(
          std::make_move_iterator(request.items.begin()),
          std::make_move_iterator(
              request.items.begin() + static_cast<int64_t>(i)));
    }
    if (is_apart) {
      const SliceList& list = *item.list;
      for (size_t part = 0; part < list.size(); ++part) {
        items.push_back(item.part(part));
      }
    } else if (is_changed) {
      items.push_back(std::move(item));
    }
  }
  if (is_changed) {
    request.items = std::move(items);
  }
  if (lists_.empty()) {
    return;
  }
  for (const auto& item : request.items) {
    const WorkerKey* key = item.list ? nullptr : keys_.find(item.key);
    for (size_t i = 0; key != nullptr && i < key->tables.size(); ++i) {
      if (const auto list = key->tables[i]->list.lock()) {
        take_apart(list);
      }
    }
  }
}

bool Worker::is_joined(const SliceList& list) const {
  const WorkerKey* key = keys_.find(list.parts()[0].key);
  return key != nullptr && key->tables.size() == 1 &&
      !key->tables[0]->list.expired();
}

// What operations on the list are made with; null: its slices differ in what
// they have seen so far, or something of them is under way.
WorkerListPtr Worker::join(const SliceListPtr& list) {
  if (config().push_regions || config().leases || list->size() < 2) {
    return nullptr;
  }
  std::vector<WorkerTablePtr> parts;
  std::vector<int64_t> lasts;
  for (size_t i = 0; i < list->size(); ++i) {
    const auto& [name, num_elements] = list->parts()[i];
    const WorkerKey* key = keys_.find(name);
    if (key == nullptr || key->deleted || key->tables.size() != 1 ||
        key->spec.total != num_elements) {
      return nullptr;
    }
    const WorkerTablePtr& table = key->tables[0];
    if (const auto known = table->list.lock()) {
      if (i == 0 && are_same(known->list, list)) {
        return known;
      }
      take_apart(known);
    }
    const WorkerTable& first = parts.empty() ? *table : *parts[0];
    if (!table->ready || !table->outstanding.empty() ||
        table->server != first.server ||
        table->item_bytes != first.item_bytes || table->kid != first.kid ||
        table->round != first.round || table->base != first.base ||
        table->known != first.known || table->bytes() > config().piece_bytes) {
      return nullptr;
    }
    parts.push_back(table);
    lasts.push_back(table->last);
  }
  if (link_of(parts[0]->server).state != LinkState::kUp) {
    return nullptr;
  }
  auto joined = std::make_shared<WorkerList>();
  joined->list = list;
  joined->lasts = unless_consecutive(std::move(lasts));
  joined->table = std::make_shared<WorkerTable>(*parts[0]);
  joined->table->slice = list->name();
  joined->table->begin = 0;
  joined->table->end = static_cast<size_t>(list->num_elements());
  joined->table->list = joined;
  for (const auto& part : parts) {
    part->list = joined;
  }
  joined->parts = std::move(parts);
  lists_.push_back(joined);
  return joined;
}

// From here on there are operations on the list's slices, also instead of those
// on the list that have no answer. `asks`: for their answers; else the server
// gives them by itself.
void Worker::take_apart(const WorkerListPtr& list, bool asks) {
  lists_.erase(std::find(lists_.begin(), lists_.end(), list));
  WorkerTable& joint = *list->table;
  for (size_t i = 0; i < list->parts.size(); ++i) {
    WorkerTable& part = *list->parts[i];
    part.list.reset();
    part.round = joint.round;
    part.base = joint.base;
    part.known = joint.known;
    part.last = number_of(joint.last, list->lasts, i);
  }
  for (const int64_t opno : joint.outstanding) {
    take_apart(opno, *list, asks);
  }
}

void Worker::take_apart(int64_t opno, const WorkerList& list, bool asks) {
  const auto node = operations_.extract(opno);
  const WorkerOperation& joint = node.mapped();
  const auto count = static_cast<int64_t>(list.parts.size());
  Message bare = joint.request; // without what only the list has
  bare.list = nullptr;
  bare.prevs.clear();
  bare.count = 1;
  auto& of_link = link_of(list.table->server).outstanding;
  auto at = std::lower_bound(of_link.begin(), of_link.end(), opno);
  at = of_link.insert(std::next(at), static_cast<size_t>(count - 1), 0);
  for (int64_t i = 1; i < count; ++i) {
    *at++ = opno + i;
  }
  const auto found = calls_.find(joint.call);
  WorkerCall* const call = found == calls_.end() ? nullptr : &found->second;
  if (call != nullptr) {
    call->left += static_cast<size_t>(count - 1);
    call->has_parts = true;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto index = static_cast<size_t>(i);
    const WorkerTablePtr& table = list.parts[index];
    WorkerOperation& part = operations_[opno + i];
    part.request = bare;
    part.request.slice = table->slice;
    part.request.opno += i;
    part.request.prev =
        number_of(joint.request.prev, joint.request.prevs, index);
    part.table = table;
    part.call = joint.call;
    part.result = joint.result;
    part.sent_at = joint.sent_at;
    part.missing = joint.missing;
    if (part.request.pieces != 0) {
      part.request.total = list.list->num_elements(index);
      part.value = list.list->part_of(
          joint.value, index, static_cast<size_t>(part.request.item_bytes));
      part.request.pieces = num_pieces(part.value.size());
      for (int32_t piece = 0;
           joint.got.contains(0) && piece < part.request.pieces;
           ++piece) {
        part.got.insert(piece);
      }
    }
    if (call != nullptr && joint.result) {
      SliceResult& result = call->results[*joint.result].parts.emplace_back();
      result.slice = table->slice;
      result.server = table->server;
      part.list_part = index;
    }
    table->outstanding.push_back(opno + i);
  }
  for (int64_t i = 0; i < count; ++i) {
    WorkerOperation& part = operations_.at(opno + i);
    const bool may_wait = part.request.pieces != 0 && !part.got.contains(0);
    if (asks || may_wait) { // in the queue
      transmit(part);
    }
  }
}

// For an error that names a slice.
void Worker::take_apart_lists(
    c10::function_ref<bool(const WorkerTable&)> which) {
  const auto lists = lists_;
  for (const auto& list : lists) {
    if (which(*list->table)) {
      take_apart(list);
    }
  }
}

// The results of operations on lists that have come apart, in their places.
std::vector<SliceResult> Worker::flat(std::vector<SliceResult> results) {
  std::vector<SliceResult> all;
  for (auto& result : results) {
    if (result.parts.empty()) {
      all.push_back(std::move(result));
    } else {
      std::move(
          result.parts.begin(), result.parts.end(), std::back_inserter(all));
    }
  }
  return all;
}

} // namespace torchkv::dist

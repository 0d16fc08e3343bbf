// Calls that name several slices together.
#include <algorithm>
#include <map>
#include <numeric>

#include "app.h"

namespace torchkv::dist::simulation {

// Names small keys of a server together, in an order that is the same on all
// ranks.
void App::join(Request& request, Row& row) const {
  const Config config = simulation_.config(id_.store, 1);
  std::map<int32_t, std::map<SliceId, Request::Item>> by_server;
  std::vector<Request::Item> items;
  for (auto& item : request.items) {
    KeySpec spec;
    spec.total = numel(item.key);
    spec.item_bytes = sizeof(Element);
    spec.sizes = {spec.total};
    if (spec.total > kPieceElements || !item.queries.empty() ||
        item.min_version != 0 || !has_key(item.key)) {
      items.push_back(std::move(item));
      continue;
    }
    const int32_t server =
        torchkv::dist::place(
            item.key, spec, config.num_servers, config.split_bytes)[0]
            .server;
    const SliceId slice{item.key, 0};
    by_server[server][slice] = std::move(item);
  }
  for (auto& [server, of_server] : by_server) {
    Request::Item joined = of_server.begin()->second;
    std::vector<SliceList::Part> parts;
    Elements elements;
    for (auto& [slice, item] : of_server) {
      parts.push_back({slice.key, numel(slice.key)});
      const Elements own = gather(item.value);
      elements.insert(elements.end(), own.begin(), own.end());
    }
    if (parts.size() > 1) {
      joined.list = std::make_shared<const SliceList>(std::move(parts));
      joined.value = elements.empty() ? Blob() : make_blob(std::move(elements));
      row.lists.push_back(joined.list);
    }
    items.push_back(std::move(joined));
  }
  request.items = std::move(items);
}

void App::note_part(Row& row, const SliceResult& from) {
  Part part;
  part.slice = from.slice;
  part.server = from.server;
  part.elements = gather(from.pieces);
  part.sum = checksum(part.elements);
  const auto asked = row.asked.find(part.slice);
  if (asked != row.asked.end()) {
    part.asked = asked->second;
  } else {
    part.asked.length = static_cast<int64_t>(part.elements.size());
    part.asked.elements.resize(part.elements.size());
    std::iota(part.asked.elements.begin(), part.asked.elements.end(), 0);
  }
  part.version = from.version;
  part.kid = from.kid;
  part.round = from.round;
  part.age = from.age;
  row.parts.push_back(std::move(part));
}

// As the call has named the slices.
void App::note_parts(Row& row, const SliceResult& from) {
  const auto& lists = row.lists;
  const auto list =
      std::find_if(lists.begin(), lists.end(), [&](const auto& x) {
        return x->name() == from.slice;
      });
  if (list == lists.end()) {
    simulation_.problem("a result of a list that was not asked for");
    return;
  }
  for (size_t i = 0; i < (*list)->size(); ++i) {
    SliceResult part = from;
    part.slice = (*list)->slice(i);
    for (Blob& piece : part.pieces) {
      piece = piece.slice(
          static_cast<size_t>((*list)->begin(i)) * sizeof(Element),
          static_cast<size_t>((*list)->num_elements(i)) * sizeof(Element));
    }
    note_part(row, part);
  }
}

} // namespace torchkv::dist::simulation

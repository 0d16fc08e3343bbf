// Lists: how slices come together, to be one in all that follows.
#include <algorithm>
#include <unordered_set>
#include <utility>

#include "server.h"

namespace torchkv::dist {
namespace {

// The values of slices that have come together, until their first update.
struct JoinedValue final : Value {
  std::vector<ValuePtr> parts;

  ValuePtr part(size_t i) const override {
    return parts[i];
  }
};

bool is_quiet(const ServerSlice& slice) {
  return !slice.joint && !slice.busy && !slice.dying && slice.norms.empty() &&
      slice.gone.empty() && slice.pending.empty() && slice.pulls.empty() &&
      !slice.first_at && slice.slots[0];
}

// Whether they have seen the same. REQUIRES: both are quiet.
bool are_alike(const ServerSlice& a, const ServerSlice& b) {
  if (a.version != b.version || a.gen != b.gen || a.snap != b.snap ||
      a.kid != b.kid || a.spec->item_bytes != b.spec->item_bytes ||
      a.spec->dtype != b.spec->dtype || a.spec->is_row_sparse() ||
      b.spec->is_row_sparse() || a.members.size() != b.members.size()) {
    return false;
  }
  return std::all_of(
      a.members.begin(), a.members.end(), [&](const auto& member) {
        const auto* other = b.members.find(member.first);
        return other && other->applied == member.second.applied &&
            other->received == member.second.received && other->attached &&
            member.second.attached;
      });
}

} // namespace

// A message about one slice, whether or not it is on a list.
void Server::receive_single(Peer& from, const Message& message, Time now) {
  const SlicePtr slice = lists_.empty() ? nullptr : find(message.slice);
  if (slice && slice->joint && message.opno >= from.floor) {
    // An answer from before the slice was on the list stays as it is.
    const auto at = from.entries.find(message.opno);
    const bool is_answered = at != from.entries.end() && at->second.reply &&
        at->second.stream->id == message.slice;
    if (!is_answered) {
      take_apart(slice->joint->shared_from_this());
    }
  }
  receive_operation(from, message, now);
}

void Server::receive_list(Peer& from, const Message& message, Time now) {
  if (message.opno < from.floor) {
    return; // a late copy; what is left of it is asked for by slices
  }
  const SliceList& list = *message.list;
  const SlicePtr first = find(list.slice(0));
  SlicePtr joint;
  if (first && first->joint && are_same(first->joint->list, message.list)) {
    joint = first->joint->shared_from_this();
  }
  // What was asked for when the slices were not together is answered so.
  const auto at = from.entries.lower_bound(message.opno);
  const bool is_known =
      at != from.entries.end() && at->first < message.opno + message.count;
  if (is_known &&
      (at->first != message.opno || at->second.stream->id != list.name())) {
    joint = nullptr;
  } else if (!is_known && !joint && message.kind != Kind::kPull) {
    joint = join(from, message); // values are together after an update only
  }
  if (joint) {
    receive_operation(from, message, now);
    return;
  }
  Message part = message; // without what only the list has
  part.list = nullptr;
  part.prevs.clear();
  part.count = 1;
  for (size_t i = 0; i < list.size(); ++i) {
    receive_single(from, part_of(message, i, part), now);
  }
}

Message Server::part_of(const Message& message, size_t i, Message part) {
  const auto number = static_cast<int64_t>(i);
  part.slice = message.list->slice(i);
  part.opno += number;
  part.prev = number_of(message.prev, message.prevs, i);
  part.acked += number;
  if (message.pieces != 0) {
    part.total = message.list->num_elements(i);
    if (message.index >= 0) {
      part.payload = message.list->part_of(
          message.payload, i, static_cast<size_t>(message.item_bytes));
    }
  }
  return part;
}

// Null unless the next operation of all members on all slices may be one.
Server::SlicePtr Server::join(Peer& from, const Message& message) {
  const SliceListPtr& list = message.list;
  if (config().leases || config().push_regions || fatal_ ||
      !snapshots_.empty() || !captures_.empty()) {
    return nullptr;
  }
  std::vector<SlicePtr> parts;
  std::unordered_set<const Slice*> seen;
  auto value = std::make_shared<JoinedValue>();
  auto round_parts = std::make_shared<std::vector<RoundPart>>();
  for (size_t i = 0; i < list->size(); ++i) {
    const SlicePtr slice = find(list->slice(i));
    if (slice && slice->joint) {
      take_apart(slice->joint->shared_from_this());
    }
    if (!slice || !is_quiet(*slice) ||
        !are_alike(*slice, parts.empty() ? *slice : *parts[0]) ||
        !seen.insert(slice.get()).second ||
        slice->num_elements != list->num_elements(i) ||
        slice->num_elements != slice->spec->total ||
        slice->num_elements * slice->spec->item_bytes >
            static_cast<int64_t>(config().piece_bytes)) {
      return nullptr;
    }
    parts.push_back(slice);
    value->parts.push_back(slice->slots[0]);
    round_parts->push_back(
        {slice->id, slice->spec, list->begin(i), slice->num_elements});
  }
  const Slice& first = *parts[0];
  if (!first.members.contains(from.rank) ||
      (sync_ && first.members.size() < peers_.size())) { // one has left
    return nullptr;
  }
  std::map<int32_t, std::vector<int64_t>> last; // operations, by rank
  for (const auto& [rank, member] : first.members) {
    auto& of_rank = last[rank] = lasts(peer(rank), parts);
    if (of_rank.empty()) {
      return nullptr;
    }
  }
  auto joint = std::make_shared<Slice>(first);
  joint->id = list->name();
  joint->list = list;
  joint->num_elements = list->num_elements();
  auto spec = std::make_shared<KeySpec>(*first.spec);
  spec->total = joint->num_elements;
  spec->sizes = {spec->total};
  joint->spec = std::move(spec);
  joint->slots[0] = std::move(value);
  joint->round_parts = std::move(round_parts);
  for (const auto& [rank, member] : first.members) {
    Stream& stream = open_stream(peer(rank), joint->id);
    stream.lasts = unless_consecutive(last[rank]);
    stream.last = stream.lasts.empty()
        ? last[rank][0]
        : *std::max_element(stream.lasts.begin(), stream.lasts.end());
  }
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    Stream& stream = *from.streams.find(parts[i]->id);
    drop_replies(from, stream, message.acked + number, now_);
    parts[i]->slots[0] = nullptr;
    parts[i]->joint = joint.get();
    parts[i]->place = i;
  }
  joint->parts = std::move(parts);
  slices_[joint->id] = joint;
  lists_.push_back(joint);
  return joint;
}

// The peer's last operations on the slices; none if some are on their way.
std::vector<int64_t> Server::lasts(
    const Peer& of,
    const std::vector<SlicePtr>& parts) {
  std::vector<int64_t> result;
  for (const auto& part : parts) {
    const Stream* stream = of.streams.find(part->id);
    if (!stream || stream->ended || !stream->held.empty() || stream->failed) {
      return {};
    }
    result.push_back(stream->last);
  }
  return result;
}

// Whether what the operation does to the slices is the same for all.
bool Server::is_joint(const Operation& op) const {
  const SlicePtr slice = find(op.slice);
  const auto* member = slice ? slice->members.find(op.rank) : nullptr;
  if (!member || !member->attached || (op.rank == 0 && op.snap > slice->snap)) {
    return false;
  }
  if (op.kind == Kind::kPull) { // the value may not be in one place yet
    const ValuePtr& value = slice->slots[0];
    return !value || !value->pieces.empty();
  }
  return op.total == slice->num_elements &&
      op.num_bytes ==
      static_cast<uint64_t>(slice->num_elements * op.item_bytes) &&
      op.round == member->received + 1;
}

} // namespace torchkv::dist

// Payloads by name: what the sender keeps, and what the receiver reads.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <utility>

#include "memory_links.h"
#include "memory_names.h"

namespace torchkv::dist {

Blob MemoryLinks::name(int32_t rank, std::vector<Blob>& payloads) {
  const auto found = links_.find(rank);
  if (payloads.empty() || found == links_.end()) {
    return {};
  }
  Link& link = found->second;
  announce(link);
  if (!is_usable(link)) {
    return {};
  }
  constexpr size_t kFew = 256; // to look at for each message
  if (link.outstanding.size() < kFew || link.free.empty()) {
    reclaim(link);
  }
  const uint64_t num_mapped = outbox_of(link.other.outbox).num_mapped.load();
  std::vector<Name> names;
  std::vector<Blob> left;
  for (size_t i = 0; i < payloads.size(); ++i) {
    Blob& payload = payloads[i];
    std::optional<Region> region;
    const bool has_ticket = !link.free.empty() || link.held.size() < kTickets;
    if (has_ticket && payload.size() >= kMinPayload) {
      region = memory_->find(payload.data(), payload.size());
    }
    if (!region || region->segment >= num_mapped) {
      left.push_back(std::move(payload));
      continue;
    }
    uint32_t ticket = 0;
    if (link.free.empty()) {
      ticket = static_cast<uint32_t>(link.held.size());
      link.held.emplace_back();
      link.uses.push_back(0);
    } else {
      ticket = link.free.back();
      link.free.pop_back();
    }
    link.held[ticket] = std::move(payload);
    link.outstanding.push_back(ticket);
    names.push_back(
        {static_cast<uint32_t>(i),
         ticket,
         ++link.uses[ticket],
         region->segment,
         region->offset,
         region->size});
  }
  payloads = std::move(left);
  if (names.empty()) {
    return {};
  }
  const NamesHead head{kNamesMagic, memory_->id(), rank_, names.size()};
  const size_t size = sizeof(head) + (names.size() * sizeof(Name));
  const auto part = std::make_shared<std::vector<std::byte>>(size);
  std::memcpy(part->data(), &head, sizeof(head));
  std::memcpy(
      part->data() + sizeof(head), names.data(), names.size() * sizeof(Name));
  return {part, part->data(), size};
}

void MemoryLinks::undo(int32_t rank, const Blob& part) {
  const auto found = links_.find(rank);
  if (part.size() == 0 || found == links_.end()) {
    return;
  }
  Link& link = found->second;
  for (size_t i = sizeof(NamesHead); i < part.size(); i += sizeof(Name)) {
    Name name{};
    std::memcpy(&name, part.data() + i, sizeof(name));
    auto& outstanding = link.outstanding;
    outstanding.erase(
        std::find(outstanding.begin(), outstanding.end(), name.ticket));
    link.held[name.ticket] = Blob();
    link.free.push_back(name.ticket);
  }
}

bool MemoryLinks::is_names(const Blob& part) {
  uint64_t magic = 0;
  if (part.size() >= sizeof(NamesHead)) {
    std::memcpy(&magic, part.data(), sizeof(magic));
  }
  return magic == kNamesMagic;
}

bool MemoryLinks::resolve(const Blob& part, std::vector<Blob>& payloads) {
  NamesHead head{};
  std::memcpy(&head, part.data(), sizeof(head));
  const size_t bytes = part.size() - sizeof(head);
  if (head.count == 0 || bytes % sizeof(Name) != 0 ||
      head.count != bytes / sizeof(Name)) {
    return false;
  }
  const auto found = links_.find(static_cast<int32_t>(head.rank));
  if (found == links_.end()) {
    return false;
  }
  Link& sender = found->second;
  if (sender.other.memory != head.memory) {
    return false;
  }
  std::vector<Blob> all;
  auto next = payloads.begin();
  bool valid = true;
  for (size_t i = 0; i < head.count; ++i) {
    Name name{};
    std::memcpy(
        &name, part.data() + sizeof(head) + (i * sizeof(Name)), sizeof(name));
    // A message that is repeated by somebody else is not read again: its
    // payload may be another one's by now.
    if (name.ticket >= kTickets || name.use <= sender.seen[name.ticket]) {
      return false;
    }
    sender.seen[name.ticket] = name.use;
    const auto segment = mapped_.find({head.memory, name.segment});
    const bool known = segment != mapped_.end() &&
        name.offset <= segment->second->size() &&
        name.size <= segment->second->size() - name.offset;
    // Also of one that cannot be read: the sender waits for its release.
    auto reading = std::make_shared<const Reading>(
        known ? segment->second : nullptr,
        sender.outbox,
        name.ticket,
        name.use);
    while (all.size() < name.place && next != payloads.end()) {
      all.push_back(std::move(*next++));
    }
    valid = valid && known && all.size() == name.place;
    if (valid) {
      const std::byte* const data = reading->data->data() + name.offset;
      all.emplace_back(std::move(reading), data, name.size);
    }
  }
  all.insert(
      all.end(),
      std::make_move_iterator(next),
      std::make_move_iterator(payloads.end()));
  payloads = std::move(all);
  return valid;
}

void MemoryLinks::reclaim(Link& link) {
  if (link.other.outbox == nullptr) {
    return;
  }
  const auto& words = outbox_of(link.other.outbox).words;
  auto& outstanding = link.outstanding;
  for (size_t i = 0; i < outstanding.size();) {
    const uint32_t ticket = outstanding[i];
    if (words[ticket].load(std::memory_order_acquire) != link.uses[ticket]) {
      ++i;
      continue;
    }
    link.held[ticket] = Blob();
    link.free.push_back(ticket);
    outstanding[i] = outstanding.back();
    outstanding.pop_back();
  }
}

void MemoryLinks::reclaim() {
  for (auto& [rank, link] : links_) {
    reclaim(link);
    if (!link.is_announced) {
      announce(link);
    }
  }
  for (auto& link : retired_) {
    reclaim(link);
  }
  retired_.erase(
      std::remove_if(
          retired_.begin(),
          retired_.end(),
          [](const Link& link) {
            return link.outstanding.empty() || link.watch->has_ended();
          }),
      retired_.end());
}

size_t MemoryLinks::num_held() const {
  size_t count = 0;
  for (const auto& [rank, link] : links_) {
    count += link.outstanding.size();
  }
  for (const auto& link : retired_) {
    count += link.outstanding.size();
  }
  return count;
}

} // namespace torchkv::dist

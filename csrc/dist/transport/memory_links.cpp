#include "memory_links.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <mutex>
#include <tuple>
#include <utility>

#include "../../core/process.h"
#include "memory_names.h"

namespace torchkv::dist {

struct MemoryLinks::Announcement {
  Token token;
  uint64_t memory; // id
  int64_t rank;
  uint64_t number; // of a segment
  uint64_t size;
  Kind kind;
};

MemoryLinks::MemoryLinks(
    int32_t rank,
    const Token& token,
    std::shared_ptr<SharedMemory> memory,
    const std::string& path)
    : rank_(rank),
      forks_(fork_count()),
      token_(token),
      memory_(std::move(memory)),
      socket_(path) {}

// What others may still read stays as long as this process.
MemoryLinks::~MemoryLinks() {
  static auto* const mutex = new std::mutex();
  static auto* const kept = new std::vector<Blob>();
  if (forks_ != fork_count()) {
    return;
  }
  reclaim();
  const std::lock_guard lock(*mutex);
  for (auto& [rank, receiver] : receivers_) {
    retired_.push_back(std::move(receiver));
  }
  for (auto& receiver : retired_) {
    for (const uint32_t ticket : receiver.outstanding) {
      if (!receiver.watch->has_ended()) {
        kept->push_back(std::move(receiver.held[ticket]));
      }
    }
  }
}

void MemoryLinks::connect(
    int32_t rank,
    const PeerAddress& address,
    std::string path) {
  const auto old = receivers_.find(rank);
  if (old != receivers_.end()) {
    retired_.push_back(std::move(old->second));
    receivers_.erase(old);
  }
  Receiver& receiver = receivers_[rank];
  receiver.path = std::move(path);
  receiver.watch = std::make_unique<ProcessWatch>(address);
  receiver.own_words = std::make_shared<const Segment>(kTickets * sizeof(Word));
  receiver.seen.resize(kTickets);
  const auto early = early_.find(rank);
  if (early != early_.end()) {
    std::tie(receiver.memory, receiver.words) = std::move(early->second);
    early_.erase(early);
  }
  announce(receiver);
}

// Whether the receiver has, or will find, what it needs to read all of this
// memory.
bool MemoryLinks::announce(Receiver& receiver) {
  if (receiver.is_refused) {
    return false;
  }
  const auto tell = [&](Kind kind, uint64_t number, const Segment& segment) {
    Announcement announcement{};
    announcement.token = token_;
    announcement.memory = memory_->id();
    announcement.rank = rank_;
    announcement.number = number;
    announcement.size = segment.size();
    announcement.kind = kind;
    std::string text(sizeof(announcement), '\0');
    std::memcpy(text.data(), &announcement, sizeof(announcement));
    const int error = socket_.send(receiver.path, text, segment.file());
    if (error == 0 || error == EAGAIN || error == ENOBUFS) {
      return error == 0;
    }
    receiver.is_refused = true;
    if (!receiver.watch->has_ended() && !std::exchange(warned_, true)) {
      TORCH_WARN(
          "torchkv: a process of this host does not take shared memory at ",
          receiver.path,
          " (",
          std::strerror(error),
          "); values travel to it over a socket");
    }
    return false;
  };
  if (!receiver.words_sent) {
    receiver.words_sent = tell(Kind::kWords, 0, *receiver.own_words);
    if (!receiver.words_sent) {
      return false;
    }
  }
  const size_t count = memory_->num_segments();
  if (receiver.num_sent < count) {
    const auto segments = memory_->segments();
    while (receiver.num_sent < segments.size()) {
      const size_t number = receiver.num_sent;
      if (!tell(Kind::kData, number, *segments[number])) {
        return false;
      }
      ++receiver.num_sent;
    }
  }
  return true;
}

void MemoryLinks::take_descriptors() {
  while (const auto received = socket_.receive()) {
    Announcement announcement{};
    const bool valid = received->message.size() == sizeof(announcement);
    if (valid) {
      std::memcpy(
          &announcement, received->message.data(), sizeof(announcement));
    }
    const size_t least =
        announcement.kind == Kind::kWords ? kTickets * sizeof(Word) : size_t{1};
    try {
      // Takes the descriptor, whatever it is.
      auto segment = std::make_shared<const Segment>(
          received->file,
          valid && announcement.token == token_ && announcement.size >= least
              ? announcement.size
              : 0);
      accept(announcement, std::move(segment));
    } catch (const c10::Error&) { // no descriptor of another rank's
    }
  }
}

void MemoryLinks::accept(const Announcement& announcement, SegmentPtr segment) {
  const auto rank = static_cast<int32_t>(announcement.rank);
  if (announcement.kind == Kind::kData) {
    mapped_[{announcement.memory, announcement.number}] = std::move(segment);
    return;
  }
  const auto found = receivers_.find(rank);
  if (found == receivers_.end() || found->second.words != nullptr) {
    early_[rank] = {announcement.memory, std::move(segment)};
  } else {
    found->second.memory = announcement.memory;
    found->second.words = std::move(segment);
  }
}

void MemoryLinks::ended(int32_t rank) {
  const auto found = receivers_.find(rank);
  if (found == receivers_.end()) {
    return;
  }
  const uint64_t memory = found->second.memory;
  receivers_.erase(found);
  mapped_.erase(
      mapped_.lower_bound({memory, 0}),
      mapped_.upper_bound({memory, UINT64_MAX}));
}

std::vector<std::byte> MemoryLinks::name(
    int32_t rank,
    std::vector<Blob>& payloads) {
  std::vector<std::byte> part;
  const auto found = receivers_.find(rank);
  if (payloads.empty() || found == receivers_.end()) {
    return part;
  }
  Receiver& receiver = found->second;
  if (receiver.words == nullptr) {
    take_descriptors();
  }
  if (receiver.words == nullptr || !announce(receiver)) {
    return part;
  }
  reclaim(receiver);
  std::vector<Name> names;
  std::vector<Blob> left;
  for (size_t i = 0; i < payloads.size(); ++i) {
    Blob& payload = payloads[i];
    std::optional<Region> region;
    const bool has_ticket =
        !receiver.free.empty() || receiver.held.size() < kTickets;
    if (has_ticket && payload.size() >= kMinPayload) {
      region = memory_->find(payload.data(), payload.size());
    }
    // One that has been added since announce() waits for the next call.
    if (!region || region->segment >= receiver.num_sent) {
      left.push_back(std::move(payload));
      continue;
    }
    uint32_t ticket = 0;
    if (receiver.free.empty()) {
      ticket = static_cast<uint32_t>(receiver.held.size());
      receiver.held.emplace_back();
      receiver.uses.push_back(0);
    } else {
      ticket = receiver.free.back();
      receiver.free.pop_back();
    }
    receiver.held[ticket] = std::move(payload);
    receiver.outstanding.push_back(ticket);
    names.push_back(
        {static_cast<uint32_t>(i),
         ticket,
         ++receiver.uses[ticket],
         region->segment,
         region->offset,
         region->size});
  }
  payloads = std::move(left);
  if (!names.empty()) {
    const NamesHead head{kNamesMagic, memory_->id(), rank_, names.size()};
    part.resize(sizeof(head) + names.size() * sizeof(Name));
    std::memcpy(part.data(), &head, sizeof(head));
    std::memcpy(
        part.data() + sizeof(head), names.data(), names.size() * sizeof(Name));
  }
  return part;
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
  const auto found = receivers_.find(static_cast<int32_t>(head.rank));
  if (found == receivers_.end()) {
    return false;
  }
  Receiver& sender = found->second;
  if (sender.memory != head.memory) {
    take_descriptors();
  }
  if (sender.memory != head.memory) {
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
    auto segment = mapped_.find({head.memory, name.segment});
    if (segment == mapped_.end()) {
      take_descriptors(); // it was sent first
      segment = mapped_.find({head.memory, name.segment});
    }
    const bool known = segment != mapped_.end() &&
        name.offset <= segment->second->size() &&
        name.size <= segment->second->size() - name.offset;
    // Also of one that cannot be read: the sender waits for its release.
    auto reading = std::make_shared<const Reading>(
        known ? segment->second : nullptr,
        sender.own_words,
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

void MemoryLinks::reclaim(Receiver& receiver) {
  if (receiver.words == nullptr) {
    return;
  }
  const auto* const words =
      reinterpret_cast<const Word*>(receiver.words->data());
  auto& outstanding = receiver.outstanding;
  for (size_t i = 0; i < outstanding.size();) {
    const uint32_t ticket = outstanding[i];
    if (words[ticket].load(std::memory_order_acquire) !=
        receiver.uses[ticket]) {
      ++i;
      continue;
    }
    receiver.held[ticket] = Blob();
    receiver.free.push_back(ticket);
    outstanding[i] = outstanding.back();
    outstanding.pop_back();
  }
}

void MemoryLinks::reclaim() {
  for (auto& [rank, receiver] : receivers_) {
    reclaim(receiver);
    if (!receiver.words_sent) {
      announce(receiver);
    }
  }
  for (auto& receiver : retired_) {
    reclaim(receiver);
  }
  retired_.erase(
      std::remove_if(
          retired_.begin(),
          retired_.end(),
          [](const Receiver& receiver) {
            return receiver.outstanding.empty() || receiver.watch->has_ended();
          }),
      retired_.end());
}

size_t MemoryLinks::num_held() const {
  size_t count = 0;
  for (const auto& [rank, receiver] : receivers_) {
    count += receiver.outstanding.size();
  }
  for (const auto& receiver : retired_) {
    count += receiver.outstanding.size();
  }
  return count;
}

} // namespace torchkv::dist

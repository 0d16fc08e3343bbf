#include "memory_links.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

#include "../../core/process.h"
#include "memory_names.h"

namespace torchkv::dist {

// An eventfd of another process.
class MemoryLinks::Bell {
 public:
  explicit Bell(int file) : file_(file) {}
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  ~Bell() {
    close(file_);
  }
  void ring() const {
    // Where it could wait, it is none of ours.
    const uint64_t one = 1;
    const auto flags = static_cast<unsigned>(fcntl(file_, F_GETFL));
    if ((flags & unsigned{O_NONBLOCK}) != 0) {
      static_cast<void>(write(file_, &one, sizeof(one)) == 0);
    }
  }

 private:
  const int file_;
};

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
    const std::string& path,
    int bell)
    : rank_(rank),
      forks_(fork_count()),
      token_(token),
      memory_(std::move(memory)),
      bell_(bell),
      socket_(path) {}

// What others may still read stays as long as this process.
MemoryLinks::~MemoryLinks() {
  // NOLINTBEGIN(bugprone-unhandled-exception-at-new): a few bytes
  static auto* const mutex = new std::mutex();
  static auto* const kept = new std::vector<Blob>();
  // NOLINTEND(bugprone-unhandled-exception-at-new)
  if (forks_ != fork_count()) {
    return;
  }
  reclaim();
  const std::lock_guard lock(*mutex);
  for (auto& [rank, link] : links_) {
    retired_.push_back(std::move(link));
  }
  for (auto& link : retired_) {
    for (const uint32_t ticket : link.outstanding) {
      if (!link.watch->has_ended()) {
        kept->push_back(std::move(link.held[ticket]));
      }
    }
  }
}

void MemoryLinks::connect(
    int32_t rank,
    const PeerAddress& address,
    std::string path) {
  Link link;
  link.path = std::move(path);
  link.watch = std::make_unique<ProcessWatch>(address);
  link.outbox = std::make_shared<const Segment>(sizeof(Outbox));
  link.seen.resize(kTickets);
  const auto old = links_.find(rank);
  if (old != links_.end()) {
    if (old->second.path == link.path) {
      return; // the same process, which still reads
    }
    unmap(old->second.other.memory);
    retired_.push_back(std::move(old->second));
    links_.erase(old);
  }
  const auto early = early_.find(rank);
  if (early != early_.end()) {
    link.other = std::move(early->second);
    early_.erase(early);
  }
  announce(link);
  confirm(link);
  links_.emplace(rank, std::move(link));
}

void MemoryLinks::confirm(const Link& link) const {
  if (link.other.outbox == nullptr || link.other.bell == nullptr) {
    return;
  }
  Outbox& own = outbox_of(link.outbox);
  uint64_t count = own.num_mapped.load(std::memory_order_relaxed);
  while (mapped_.count({link.other.memory, count}) != 0) {
    ++count;
  }
  own.num_mapped.store(count);
  own.has_taken.store(1);
}

// Whether the two have each other's outboxes and bells.
bool MemoryLinks::is_usable(const Link& link) const {
  return link.other.outbox != nullptr && link.other.bell != nullptr &&
      outbox_of(link.other.outbox).has_taken.load() != 0;
}

void MemoryLinks::unmap(uint64_t memory) {
  mapped_.erase(
      mapped_.lower_bound({memory, 0}),
      mapped_.upper_bound({memory, UINT64_MAX}));
}

void MemoryLinks::heard(int32_t rank, int64_t incarnation) {
  const auto link = links_.find(rank);
  if (link != links_.end()) {
    link->second.incarnation = incarnation;
  }
}

bool MemoryLinks::has_heard(int32_t rank, int64_t incarnation) const {
  const auto link = links_.find(rank);
  return link != links_.end() && link->second.incarnation == incarnation;
}

// Sends what has not been sent of this process's descriptors. False: some could
// not be, yet.
bool MemoryLinks::announce(Link& link) {
  if (link.is_refused) {
    return false;
  }
  const auto tell = [&](Kind kind, uint64_t number, size_t size, int file) {
    Announcement announcement{};
    announcement.token = token_;
    announcement.memory = memory_->id();
    announcement.rank = rank_;
    announcement.number = number;
    announcement.size = size;
    announcement.kind = kind;
    std::string text(sizeof(announcement), '\0');
    std::memcpy(text.data(), &announcement, sizeof(announcement));
    const int error = socket_.send(link.path, text, file);
    if (error == 0 || error == EAGAIN || error == ENOBUFS ||
        error == ETOOMANYREFS) {
      return error == 0; // or later
    }
    link.is_refused = true;
    if (!link.watch->has_ended() && !std::exchange(warned_, true)) {
      TORCH_WARN(
          "torchkv: a process of this host does not take shared memory at ",
          link.path,
          " (",
          std::strerror(error),
          "); values travel to it over a socket");
    }
    return false;
  };
  if (!link.is_announced) {
    const Segment& outbox = *link.outbox;
    link.is_announced = tell(Kind::kOutbox, 0, outbox.size(), outbox.file()) &&
        tell(Kind::kBell, 0, 0, bell_);
    if (!link.is_announced) {
      return false;
    }
  }
  const size_t count = memory_->num_segments();
  if (link.num_sent < count) {
    const auto segments = memory_->segments();
    while (link.num_sent < segments.size()) {
      const size_t number = link.num_sent;
      const Segment& segment = *segments[number];
      if (!tell(Kind::kData, number, segment.size(), segment.file())) {
        return false;
      }
      ++link.num_sent;
    }
  }
  return true;
}

void MemoryLinks::take_descriptors() {
  while (const auto received = socket_.receive()) {
    Announcement announcement{};
    if (received->message.size() == sizeof(announcement)) {
      std::memcpy(
          &announcement, received->message.data(), sizeof(announcement));
    }
    if (announcement.token != token_) {
      close(received->file);
      continue;
    }
    try {
      accept(announcement, received->file);
    } catch (const c10::Error& error) { // not what it says
      TORCH_WARN(
          "torchkv: rank ",
          announcement.rank,
          ": ",
          error.what_without_backtrace());
    }
  }
}

// Takes the descriptor.
void MemoryLinks::accept(const Announcement& announcement, int file) {
  const auto rank = static_cast<int32_t>(announcement.rank);
  const auto link = links_.find(rank);
  if (announcement.kind == Kind::kData) {
    mapped_[{announcement.memory, announcement.number}] =
        std::make_shared<const Segment>(file, announcement.size);
  } else {
    const bool is_early = link == links_.end() ||
        (link->second.other.memory != 0 &&
         link->second.other.memory != announcement.memory);
    Other& other = is_early ? early_[rank] : link->second.other;
    if (other.memory != announcement.memory) {
      unmap(other.memory);
      other = {announcement.memory, nullptr, nullptr};
    }
    if (announcement.kind == Kind::kBell) {
      other.bell = std::make_shared<const Bell>(file);
    } else {
      other.outbox = std::make_shared<const Segment>(file, sizeof(Outbox));
    }
  }
  if (link != links_.end()) {
    confirm(link->second);
  }
}

void MemoryLinks::ended(int32_t rank) {
  const auto found = links_.find(rank);
  if (found == links_.end()) {
    return;
  }
  const uint64_t memory = found->second.other.memory;
  links_.erase(found);
  unmap(memory);
}

bool MemoryLinks::put(
    int32_t rank,
    Direction direction,
    const std::vector<Blob>& parts) {
  const auto found = links_.find(rank);
  if (found == links_.end() || !is_usable(found->second)) {
    return false;
  }
  const Link& link = found->second;
  const Outbox& other = outbox_of(link.other.outbox);
  if (!put_message(outbox_of(link.outbox), other, direction, parts)) {
    return false;
  }
  // After the message: either this sees that the other waits, or the other
  // sees the message before it waits.
  if (other.waiting.load() != 0) {
    link.other.bell->ring();
  }
  return true;
}

// The ranks in turn.
std::optional<MemoryLinks::Taken> MemoryLinks::take() {
  for (size_t i = 0; i < links_.size(); ++i) {
    auto at = links_.upper_bound(last_taken_);
    if (at == links_.end()) {
      at = links_.begin();
    }
    auto& [rank, link] = *at;
    last_taken_ = rank;
    if (link.other.outbox == nullptr) {
      continue;
    }
    try {
      auto message =
          take_message(outbox_of(link.outbox), outbox_of(link.other.outbox));
      if (message) {
        return Taken{rank, *std::move(message)};
      }
    } catch (const c10::Error& error) {
      TORCH_WARN("torchkv: rank ", rank, ": ", error.what_without_backtrace());
      outbox_of(link.outbox).has_taken.store(0);
      link.other = {};
      link.is_refused = true;
    }
  }
  return std::nullopt;
}

bool MemoryLinks::wait_for_bell() {
  bool is_empty = true;
  for (const auto& [rank, link] : links_) {
    outbox_of(link.outbox).waiting.store(1);
  }
  for (const auto& [rank, link] : links_) {
    is_empty = is_empty &&
        (link.other.outbox == nullptr ||
         !has_message(outbox_of(link.outbox), outbox_of(link.other.outbox)));
  }
  return is_empty;
}

void MemoryLinks::stop_waiting() {
  for (const auto& [rank, link] : links_) {
    outbox_of(link.outbox).waiting.store(0, std::memory_order_relaxed);
  }
}

} // namespace torchkv::dist

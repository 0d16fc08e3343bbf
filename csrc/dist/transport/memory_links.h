#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../core/export.h"
#include "../protocol/blob.h"
#include "descriptor_socket.h"
#include "frame.h"
#include "host.h"
#include "outbox.h"
#include "shared_memory.h"

namespace torchkv::dist {

// Payloads between processes of one host by name: the sender's memory is mapped
// by the link, which tells through memory of its own when it does not read
// a payload any more. Until then the sender keeps it, also if the receiver
// seems lost: only its end is sure. What it may still read at the destructor is
// never freed.
//
// A sender gives each payload in flight a ticket, a number below kTickets, with
// a use, which counts the ticket's payloads. The receiver writes the use into
// its word of the ticket when the payload's last reader has ended.
//
// Used by one thread at a time. Payloads that it has received may be released
// by any thread, and outlive it.
//
// Short messages go through a ring of the sender's, which the receiver reads
// when the bell rings or when it looks for it.
class TORCHKV_API MemoryLinks {
 public:
  // `path`: where others send the descriptors of their memory. `bell`: an
  // eventfd, which other processes write to when they have put a message, if
  // this one has said that it waits. RuntimeError if this process cannot take
  // part.
  MemoryLinks(
      int32_t rank,
      const Token& token,
      std::shared_ptr<SharedMemory> memory,
      const std::string& path,
      int bell);
  MemoryLinks(const MemoryLinks&) = delete;
  MemoryLinks& operator=(const MemoryLinks&) = delete;
  ~MemoryLinks();

  // Readable when take_descriptors() is to be called.
  int fd() const {
    return socket_.fd();
  }
  void take_descriptors();

  // A process of this host, and the path of its socket. Replaces an earlier one
  // of the rank, to which nothing is named any more. c10::Error if the system
  // has no memory or descriptor for it.
  void connect(int32_t rank, const PeerAddress& address, std::string path);
  // The rank's process has ended: it reads nothing any more.
  void ended(int32_t rank);

  // The incarnation of the rank's worker, from a request of this process.
  void heard(int32_t rank, int64_t incarnation);
  bool has_heard(int32_t rank, int64_t incarnation) const;

  // Takes the payloads that the rank can read in this memory out of `payloads`,
  // and returns a part that names them; empty: none.
  Blob name(int32_t rank, std::vector<Blob>& payloads);
  // That message has not been sent.
  void undo(int32_t rank, const Blob& part);
  static bool is_names(const Blob& part);
  // Puts the payloads that such a part names back into their places. False: the
  // message is to be dropped.
  bool resolve(const Blob& part, std::vector<Blob>& payloads);

  // Puts a message into memory that the rank reads; false: it is to be sent
  // otherwise.
  bool put(int32_t rank, Direction direction, const std::vector<Blob>& parts);
  struct Taken {
    int32_t rank = 0; // the sender
    RingMessage message;
  };
  // The next message of any rank.
  std::optional<Taken> take();
  // From now on the bell is rung for messages. False: one has come already.
  bool wait_for_bell();
  void stop_waiting();

  // Releases what receivers do not read any more. To be called now and then.
  void reclaim();
  // Payloads that receivers may still read.
  size_t num_held() const;

  static constexpr uint32_t kTickets = Outbox::kTickets; // of one receiver
  // Smaller ones are cheaper to copy.
  static constexpr size_t kMinPayload = SharedMemory::kAlignment;

 private:
  enum class Kind : uint32_t { kData, kOutbox, kBell };
  struct Announcement;

  class Bell;
  // What another process has announced.
  struct Other {
    uint64_t memory = 0; // its id
    SegmentPtr outbox;
    std::shared_ptr<const Bell> bell;
  };
  // With another process.
  struct Link {
    std::string path;
    std::unique_ptr<ProcessWatch> watch;
    SegmentPtr outbox; // this process's
    Other other;
    bool is_announced = false; // to the other, but for segments
    size_t num_sent = 0; // segments
    int64_t incarnation = 0; // of its worker; 0: unknown
    bool is_refused = false; // its socket is missing
    // Payloads that it may read.
    std::vector<Blob> held; // by ticket
    std::vector<uint64_t> uses; // by ticket, the latest
    std::vector<uint32_t> free;
    std::vector<uint32_t> outstanding;
    // Payloads of its memory.
    std::vector<uint64_t> seen; // uses that have come, by ticket
  };
  bool announce(Link& link);
  // Tells the other what has been taken of its descriptors.
  void confirm(const Link& link) const;
  bool is_usable(const Link& link) const;
  void unmap(uint64_t memory);
  void reclaim(Link& link);
  void accept(const Announcement& announcement, int file);

  const int32_t rank_;
  const uint64_t forks_;
  const Token token_;
  const std::shared_ptr<SharedMemory> memory_;
  const int bell_;
  const DescriptorSocket socket_;
  std::map<int32_t, Link> links_;
  std::vector<Link> retired_; // replaced, but perhaps still reading
  std::map<int32_t, Other> early_; // of ranks that connect() does not know
  std::map<std::pair<uint64_t, uint64_t>, SegmentPtr> mapped_; // memory, number
  int32_t last_taken_ = -1; // the rank
  bool warned_ = false;
};

} // namespace torchkv::dist

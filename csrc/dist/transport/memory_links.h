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
#include "shared_memory.h"

namespace torchkv::dist {

// Payloads between processes of one host by name: the sender's memory is mapped
// by the receiver, which tells through memory of its own when it does not read
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
class TORCHKV_API MemoryLinks {
 public:
  // `path`: where others send the descriptors of their memory. RuntimeError if
  // this process cannot take part.
  MemoryLinks(
      int32_t rank,
      const Token& token,
      std::shared_ptr<SharedMemory> memory,
      const std::string& path);
  MemoryLinks(const MemoryLinks&) = delete;
  MemoryLinks& operator=(const MemoryLinks&) = delete;
  ~MemoryLinks();

  // Readable when take_descriptors() is to be called.
  int fd() const {
    return socket_.fd();
  }
  void take_descriptors();

  // A process of this host, and the path of its socket. Replaces an earlier one
  // of the rank, to which nothing is named any more.
  void connect(int32_t rank, const PeerAddress& address, std::string path);
  // The rank's process has ended: it reads nothing any more.
  void ended(int32_t rank);

  // Takes the payloads that the rank can read in this memory out of `payloads`,
  // and returns a part that names them; empty: none.
  std::vector<std::byte> name(int32_t rank, std::vector<Blob>& payloads);
  static bool is_names(const Blob& part);
  // Puts the payloads that such a part names back into their places. False: the
  // message is to be dropped.
  bool resolve(const Blob& part, std::vector<Blob>& payloads);

  // Releases what receivers do not read any more. To be called now and then.
  void reclaim();
  // Payloads that receivers may still read.
  size_t num_held() const;

  static constexpr uint32_t kTickets = 16384; // of one receiver
  // Smaller ones are cheaper to copy.
  static constexpr size_t kMinPayload = SharedMemory::kAlignment;

 private:
  using Word = std::atomic<uint64_t>;
  static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

  enum class Kind : uint32_t { kData, kWords };
  struct Announcement;

  // To a process that payloads are named to.
  struct Receiver {
    std::string path;
    std::unique_ptr<ProcessWatch> watch;
    SegmentPtr own_words; // that it reads: of its payloads here
    bool words_sent = false;
    size_t num_sent = 0; // segments
    bool is_refused = false; // its socket is missing
    SegmentPtr words; // its words
    std::vector<Blob> held; // by ticket
    std::vector<uint64_t> uses; // by ticket, the latest
    std::vector<uint32_t> free;
    std::vector<uint32_t> outstanding;
    std::vector<uint64_t> seen; // uses of its tickets that have come, by ticket
    uint64_t memory = 0; // its id, when known
  };
  bool announce(Receiver& receiver);
  void reclaim(Receiver& receiver);
  void accept(const Announcement& announcement, SegmentPtr segment);

  const int32_t rank_;
  const uint64_t forks_;
  const Token token_;
  const std::shared_ptr<SharedMemory> memory_;
  const DescriptorSocket socket_;
  std::map<int32_t, Receiver> receivers_;
  std::vector<Receiver> retired_; // replaced, but perhaps still reading
  std::map<int32_t, std::pair<uint64_t, SegmentPtr>> early_; // words
  std::map<std::pair<uint64_t, uint64_t>, SegmentPtr> mapped_; // memory, number
  bool warned_ = false;
};

} // namespace torchkv::dist

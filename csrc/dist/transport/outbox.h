#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../core/export.h"
#include "../protocol/blob.h"
#include "transport.h"

namespace torchkv::dist {

// What a process lets another one of its host read: the words of the other's
// tickets (see MemoryLinks), and a ring of short messages to it. At the start
// of a Segment; each process writes its own and reads the other's.
struct Outbox {
  static constexpr uint32_t kTickets = 16384;
  static constexpr size_t kRingBytes = size_t{256} << 10U;
  using Word = std::atomic<uint64_t>;
  static_assert(sizeof(Word) == 8 && Word::is_always_lock_free);

  alignas(64) Word written; // bytes, to the ring here
  alignas(64) Word consumed; // bytes, of the ring in the other outbox
  alignas(64) Word waiting; // 1: messages are to be announced
  // Of what the other has sent descriptors of: 1 if its outbox and bell have
  // been taken; its segments 0 to this one.
  alignas(64) Word has_taken;
  Word num_mapped;
  alignas(64) Word words[kTickets];
  alignas(64) std::byte ring[kRingBytes];
};

struct RingMessage {
  Direction direction = Direction::kRequest;
  std::vector<Blob> parts;
};

// Longer messages find no place in the ring.
constexpr size_t kMaxRingMessage = Outbox::kRingBytes / 4;

// Copies a message into the ring of `own`, from which the process of `other`
// reads. False: it is full, or the message is too long.
TORCHKV_API bool put_message(
    Outbox& own,
    const Outbox& other,
    Direction direction,
    const std::vector<Blob>& parts);
// The next message in the ring of `other`; none: it is empty. Throws c10::Error
// if what is there is no message: then nothing in it can be read any more.
TORCHKV_API std::optional<RingMessage> take_message(
    Outbox& own,
    const Outbox& other);
inline bool has_message(const Outbox& own, const Outbox& other) {
  return other.written.load() != own.consumed.load(std::memory_order_relaxed);
}

} // namespace torchkv::dist

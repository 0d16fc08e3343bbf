#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "../../core/process.h"
#include "outbox.h"
#include "shared_memory.h"

namespace torchkv::dist {

// What MemoryLinks sends, and what its receivers hold.

constexpr uint64_t kNamesMagic = 0x73656d616e766b74; // "tkvnames"

// What a names part holds, as it is in memory: both are processes of one host.
struct NamesHead {
  uint64_t magic;
  uint64_t memory; // id
  int64_t rank; // the sender
  uint64_t count;
};
struct Name {
  uint32_t place; // among the payloads
  uint32_t ticket;
  uint64_t use;
  uint64_t segment;
  uint64_t offset;
  uint64_t size;
};
static_assert(sizeof(NamesHead) == 32 && sizeof(Name) == 40);

inline Outbox& outbox_of(const SegmentPtr& segment) {
  return *reinterpret_cast<Outbox*>(segment->data());
}

// What the receiver of a payload holds until its last reader has ended.
struct Reading {
  Reading(SegmentPtr data, SegmentPtr outbox, uint32_t ticket, uint64_t use)
      : data(std::move(data)),
        outbox(std::move(outbox)),
        ticket(ticket),
        use(use),
        forks(fork_count()) {}
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;
  ~Reading() {
    if (forks == fork_count()) { // else the parent may be reading
      outbox_of(outbox).words[ticket].store(use, std::memory_order_release);
    }
  }

  const SegmentPtr data; // null: unknown here
  const SegmentPtr outbox;
  const uint32_t ticket;
  const uint64_t use;
  const uint64_t forks;
};

} // namespace torchkv::dist

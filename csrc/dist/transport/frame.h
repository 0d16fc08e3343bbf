#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../../core/export.h"
#include "../protocol/blob.h"
#include "../protocol/message.h"
#include "list_cache.h"
#include "transport.h"

namespace torchkv::dist {

// How messages travel. A frame is a head, one buffer, and its long payloads.
// docs/protocol.md documents the format.

// Secret of the job: frames with another one are refused.
using Token = std::array<std::byte, 16>;

constexpr uint16_t kFrameVersion = 2;
// Payloads of fewer bytes are in the head, at multiples of kInlineAlignment
// from its start.
constexpr size_t kLongPayload = 4096;
constexpr size_t kInlineAlignment = 16;
// What a frame may hold. The texts of errors are cut when they are encoded; the
// rest is for the callers of encode to observe.
constexpr size_t kMaxMessages = 65536;
constexpr int32_t kMaxListed = 65536; // slices of a list
constexpr size_t kMaxKeyBytes = 65536;
constexpr size_t kMaxTextBytes = 65536;
constexpr size_t kMaxKeyDims = 256;
// Counters are less than this, so that the cores may add to them.
constexpr int64_t kMaxCounter = static_cast<int64_t>(uint64_t{1} << 62U);
// Of one key, so that their bytes can be counted, too.
constexpr int64_t kMaxElements = static_cast<int64_t>(uint64_t{1} << 48U);

// Of the store that a frame is for.
struct Limits {
  int32_t num_workers = 1;
  int32_t num_servers = 1;
  int32_t num_pieces = 1048576; // of one payload
  ListCache* lists = nullptr; // or none
};

struct Encoded {
  std::vector<std::byte> head;
  std::vector<Blob> payloads; // the long ones, by reference
};

// The header is that of the first message: the numbers in it only grow, and its
// floor drops none of the messages.
// REQUIRES: 1 to kMaxMessages messages, of the direction, with the same job,
// store, rank, server and incarnations.
TORCHKV_API Encoded encode(
    const Message* messages,
    size_t num_messages,
    Direction direction,
    const Token& token);
inline Encoded encode(
    const Frame& frame,
    Direction direction,
    const Token& token) {
  return encode(frame.data(), frame.size(), direction, token);
}

// None unless the bytes are what `encode` makes of valid messages of this
// direction: whoever sent them, the cores see fields within their limits only.
// Never throws but for want of memory, of which it needs a constant multiple of
// the head's size. Payloads are not copied: they are in `payloads` or refer to
// the head.
TORCHKV_API std::optional<Frame> decode(
    const Blob& head,
    const std::vector<Blob>& payloads,
    Direction direction,
    const Token& token,
    const Limits& limits);

} // namespace torchkv::dist

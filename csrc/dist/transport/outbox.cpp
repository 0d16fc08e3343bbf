#include "outbox.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace torchkv::dist {
namespace {

// A message begins with numbers of 8 bytes: its size, all in all, the
// direction, the number of parts, and their sizes. Then come the parts. All
// begin at multiples of kAlignment.
constexpr size_t kNumber = sizeof(uint64_t);
constexpr size_t kFixedNumbers = 3;
constexpr size_t kAlignment = 16;

size_t aligned(size_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

// Copies of bytes at a position that wraps around.
void write_at(std::byte* ring, uint64_t position, const void* data, size_t n) {
  const size_t begin = position % Outbox::kRingBytes;
  const size_t first = std::min(n, Outbox::kRingBytes - begin);
  const auto* const from = static_cast<const std::byte*>(data);
  std::memcpy(ring + begin, from, first);
  std::memcpy(ring, from + first, n - first);
}

void read_at(const std::byte* ring, uint64_t position, void* data, size_t n) {
  const size_t begin = position % Outbox::kRingBytes;
  const size_t first = std::min(n, Outbox::kRingBytes - begin);
  auto* const to = static_cast<std::byte*>(data);
  std::memcpy(to, ring + begin, first);
  std::memcpy(to + first, ring, n - first);
}

} // namespace

bool put_message(
    Outbox& own,
    const Outbox& other,
    Direction direction,
    const std::vector<Blob>& parts) {
  std::vector<uint64_t> numbers{
      0, static_cast<uint64_t>(direction), parts.size()};
  const size_t begin = aligned((kFixedNumbers + parts.size()) * kNumber);
  size_t size = begin;
  for (const auto& part : parts) {
    numbers.push_back(part.size());
    size += aligned(part.size());
    if (size > kMaxRingMessage) {
      return false;
    }
  }
  numbers[0] = size;
  uint64_t position = own.written.load(std::memory_order_relaxed);
  const uint64_t used = position - other.consumed.load();
  if (used > Outbox::kRingBytes || size > Outbox::kRingBytes - used) {
    return false;
  }
  const uint64_t end = position + size;
  write_at(own.ring, position, numbers.data(), numbers.size() * kNumber);
  position += begin;
  for (const auto& part : parts) {
    if (part.size() != 0) {
      write_at(own.ring, position, part.data(), part.size());
    }
    position += aligned(part.size());
  }
  own.written.store(end);
  return true;
}

std::optional<RingMessage> take_message(Outbox& own, const Outbox& other) {
  uint64_t position = own.consumed.load(std::memory_order_relaxed);
  const uint64_t available = other.written.load() - position;
  if (available == 0) {
    return std::nullopt;
  }
  uint64_t size = 0;
  read_at(other.ring, position, &size, kNumber);
  TORCH_CHECK(
      size >= kFixedNumbers * kNumber && size <= available &&
          size <= kMaxRingMessage,
      "shared memory: expected a message, but got something else");
  auto owner = std::make_shared<std::vector<std::byte>>(size);
  read_at(other.ring, position, owner->data(), size);
  own.consumed.store(position + size);
  const auto number = [&](size_t i) {
    uint64_t result = 0;
    std::memcpy(&result, owner->data() + (i * kNumber), kNumber);
    return result;
  };
  RingMessage message;
  const uint64_t num_parts = number(2);
  TORCH_CHECK(
      number(1) <= static_cast<uint64_t>(Direction::kAnswer) &&
          num_parts <= size / kNumber - kFixedNumbers,
      "shared memory: expected a message, but got something else");
  message.direction = static_cast<Direction>(number(1));
  size_t begin = aligned((kFixedNumbers + num_parts) * kNumber);
  for (uint64_t i = 0; i < num_parts; ++i) {
    const uint64_t part = number(kFixedNumbers + i);
    TORCH_CHECK(
        begin <= size && part <= size - begin,
        "shared memory: expected a message, but got something else");
    message.parts.emplace_back(owner, owner->data() + begin, part);
    begin += aligned(part);
  }
  return message;
}

} // namespace torchkv::dist

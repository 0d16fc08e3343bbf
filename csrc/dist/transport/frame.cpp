#include "frame.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "frame_fields.h"

namespace torchkv::dist {
namespace {

// "TKVF", version, direction, token, and where the inline payloads follow.
constexpr uint32_t kFrameMagic = 0x46564B54;
constexpr size_t kTokenAt = 8;
constexpr size_t kEndAt = kTokenAt + std::tuple_size_v<Token>;
constexpr size_t kPreambleBytes = kEndAt + 8;

uint64_t number_at(const std::byte* data, size_t num_bytes) {
  uint64_t result = 0;
  for (size_t i = num_bytes; i > 0; --i) {
    result = (result << 8U) | static_cast<uint64_t>(data[i - 1]);
  }
  return result;
}

// In a time that does not tell where they differ.
bool same_token(const std::byte* data, const Token& token) {
  std::byte difference{0};
  for (size_t i = 0; i < token.size(); ++i) {
    difference |= data[i] ^ token[i];
  }
  return difference == std::byte{0};
}

bool travels(Kind kind, Direction direction) {
  return kind == Kind::kGot ||
      is_answer(kind) == (direction == Direction::kAnswer);
}

bool may_have_list(Kind kind) {
  return kind == Kind::kPush || kind == Kind::kPushPull || kind == Kind::kPull;
}

bool has_slice(Kind kind) {
  return kind == Kind::kInit || kind == Kind::kDelete || kind == Kind::kNorm ||
      kind == Kind::kFactor;
}

template <class Coder, class C>
void code_counts(Coder& coder, C& counts) {
  coder.list(counts, 3, [&](auto& count) {
    code_slice(coder, count.first);
    coder.counter(count.second);
  });
  // Sorted, each slice once.
  coder.expect(
      std::adjacent_find(
          counts.begin(), counts.end(), [](const auto& a, const auto& b) {
            return !(a.first < b.first);
          }) == counts.end());
}

// The slice, or the list.
template <class Coder, class M>
void code_slices(Coder& coder, M& message) {
  code_slice(coder, message.slice, SliceId::kList);
  coder.expect(!message.slice.is_server());
  if (message.slice.is_list()) {
    coder.slices(message.list, message.count);
    coder.expect(message.list && message.list->name() == message.slice);
  }
}

// What is in the message of a payload or a value: a piece, or a region.
template <class Coder, class M>
void code_piece(Coder& coder, M& message) {
  coder.ranged(message.pieces, 0, int64_t{coder.limits.num_pieces} + 1);
  coder.ranged(message.index, -1, message.pieces);
  coder.payload(message.payload);
  if (message.kind != Kind::kInit && message.kind != Kind::kPull) {
    coder.optional(
        message.region, [&](auto& region) { code_region(coder, region); });
  }
  coder.expect(
      message.payload.size() == 0 || (message.index >= 0 && !message.region));
}

template <class Coder, class M>
void code_push(Coder& coder, M& message) {
  code_piece(coder, message);
  coder.counter(message.total);
  coder.expect(message.total <= kMaxElements);
  coder.flag(message.is_encoded);
  coder.ranged(message.dtype, 0, kEndDtype);
  coder.ranged(message.item_bytes, 0, kEndItemBytes);
  coder.counter(message.round);
  coder.counter(message.base);
}

template <class Coder, class M>
void code_have(Coder& coder, M& message) {
  coder.list(message.have, 1, [&](auto& index) {
    coder.ranged(index, 0, coder.limits.num_pieces);
  });
}

template <class Coder, class M>
void code_operation(Coder& coder, M& message) {
  const auto kind = message.kind;
  if (may_have_list(kind)) {
    code_slices(coder, message);
  } else if (has_slice(kind)) {
    code_slice(coder, message.slice);
  }
  coder.counter(message.opno, 1);
  coder.before(message.prev, message.opno);
  coder.expect(message.prev < message.opno);
  if (message.list) {
    coder.list(message.prevs, 1, [&](auto& prev) {
      coder.before(prev, message.opno);
      coder.expect(prev < message.opno);
    });
  }
  coder.before(message.acked, message.opno);
  coder.signed_integer(message.priority);
  coder.counter(message.gen);
  coder.counter(message.snap);
  const auto group = [&](auto& value) { code_group(coder, value); };
  switch (kind) {
    case Kind::kInit:
      code_piece(coder, message);
      code_spec(coder, message.spec);
      break;
    case Kind::kPush:
      code_push(coder, message);
      coder.optional(message.group, group);
      break;
    case Kind::kPushPull:
      code_push(coder, message);
      code_have(coder, message);
      coder.optional(message.group, group);
      break;
    case Kind::kPull:
      code_piece(coder, message);
      coder.counter(message.round);
      coder.counter(message.min_version);
      code_have(coder, message);
      break;
    case Kind::kConfig:
      coder.payload(message.payload);
      coder.counter(message.retire);
      break;
    case Kind::kSnapshot:
      coder.counter(message.step);
      code_counts(coder, message.counts);
      break;
    case Kind::kEnter:
    case Kind::kMeet:
    case Kind::kClose:
      code_counts(coder, message.counts);
      break;
    case Kind::kNorm:
      coder.counter(message.round);
      coder.optional(message.group, group);
      break;
    case Kind::kFactor:
      coder.counter(message.round);
      coder.real(message.factor);
      coder.expect(std::isfinite(message.factor));
      break;
    default: // kDelete: no more
      break;
  }
}

template <class Coder, class M>
void code_operation_answer(Coder& coder, M& message) {
  coder.counter(message.opno, 1);
  coder.ranged(message.count, 1, int64_t{kMaxListed} + 1);
  switch (message.kind) {
    case Kind::kDone:
      coder.counter(message.round);
      coder.counter(message.version);
      coder.counter(message.kid);
      coder.signed_integer(message.age);
      coder.counter(message.phase);
      coder.rare_real(message.partial);
      break;
    case Kind::kValue:
      code_piece(coder, message);
      coder.expect(message.index >= 0 || message.region);
      coder.counter(message.round);
      coder.counter(message.version);
      coder.counter(message.kid);
      break;
    default: // kWait
      code_ranks(coder, message.missing);
      break;
  }
}

template <class Coder, class M>
void code_message(Coder& coder, M& message, Direction direction) {
  coder.enumerator(message.kind, Kind::kError);
  const auto kind = message.kind;
  coder.expect(travels(kind, direction));
  const auto error = [&](auto& value) { code_error(coder, value); };
  switch (kind) {
    case Kind::kHello:
    case Kind::kBye:
      break;
    case Kind::kHeartbeat:
    case Kind::kAlive:
      coder.optional(message.error, error);
      break;
    case Kind::kReject:
    case Kind::kFatal:
      coder.optional(message.error, error);
      coder.expect(message.error.has_value());
      break;
    case Kind::kError:
      coder.counter(message.opno, 1);
      coder.ranged(message.count, 1, int64_t{kMaxListed} + 1);
      coder.optional(message.error, error);
      coder.expect(message.error.has_value());
      break;
    case Kind::kFree:
    case Kind::kFreed:
      coder.list(message.opnos, 1, [&](auto& opno) { coder.counter(opno, 1); });
      break;
    case Kind::kGot:
      coder.list(message.got, 2, [&](auto& got) {
        coder.counter(got.first, 1);
        coder.ranged(got.second, 0, coder.limits.num_pieces);
      });
      break;
    case Kind::kWelcome:
      coder.counter(message.gen);
      coder.counter(message.snap);
      coder.counter(message.phase);
      coder.payload(message.payload);
      break;
    case Kind::kExpired:
      coder.counter(message.by);
      break;
    case Kind::kDone:
    case Kind::kValue:
    case Kind::kWait:
      code_operation_answer(coder, message);
      break;
    default:
      code_operation(coder, message);
      break;
  }
}

} // namespace

Encoded encode(
    const Message* messages,
    size_t num_messages,
    Direction direction,
    const Token& token) {
  size_t size_hint = 256 + (num_messages * 64);
  for (size_t i = 0; i < num_messages; ++i) {
    const size_t size = messages[i].payload.size();
    size_hint += size < kLongPayload ? size + kInlineAlignment : 0;
  }
  FrameWriter writer(size_hint);
  writer.fixed(kFrameMagic, 4);
  writer.fixed(kFrameVersion, 2);
  writer.fixed(static_cast<uint64_t>(direction), 2);
  writer.raw(token.data(), token.size());
  writer.fixed(0); // the end, below
  code_header(writer, messages[0].header, direction);
  writer.integer(num_messages);
  for (size_t i = 0; i < num_messages; ++i) {
    code_message(writer, messages[i], direction);
  }
  const size_t end = writer.size();
  writer.resize(kEndAt);
  writer.fixed(end);
  writer.resize(end);

  Encoded result;
  for (const Blob* payload : writer.payloads()) {
    if (payload->size() >= kLongPayload) {
      result.payloads.push_back(*payload);
    } else {
      writer.align();
      writer.raw(payload->data(), payload->size());
    }
  }
  result.head = writer.take();
  return result;
}

std::optional<Frame> decode(
    const Blob& head,
    const std::vector<Blob>& payloads,
    Direction direction,
    const Token& token,
    const Limits& limits) {
  const std::byte* data = head.data();
  if (head.size() < kPreambleBytes || number_at(data, 4) != kFrameMagic ||
      number_at(data + 4, 2) != kFrameVersion ||
      number_at(data + 6, 2) != static_cast<uint64_t>(direction) ||
      !same_token(data + kTokenAt, token)) {
    return std::nullopt;
  }
  const uint64_t end = number_at(data + kEndAt, 8);
  if (end < kPreambleBytes || end > head.size()) {
    return std::nullopt;
  }
  FrameReader reader(head, kPreambleBytes, end, payloads, limits);
  Header header;
  code_header(reader, header, direction);
  uint64_t num_messages = 0;
  reader.integer(num_messages);
  reader.expect(num_messages >= 1 && num_messages <= kMaxMessages);
  Frame frame;
  // Enough for most frames; a claim of more is believed when it comes true.
  frame.reserve(
      reader.ok() ? std::min(num_messages, reader.left() / 8 + 1) : 0);
  for (uint64_t i = 0; i < num_messages && reader.ok(); ++i) {
    Message& message = frame.emplace_back();
    message.header = header;
    code_message(reader, message, direction);
  }
  if (!reader.finished()) {
    return std::nullopt;
  }
  return frame;
}

} // namespace torchkv::dist

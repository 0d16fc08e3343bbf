#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "dist/transport/frame.h"
#include "random_frame.h"

namespace torchkv::dist {

// What a stranger may send: most of it nearly valid, so that it gets far.
class FrameMutator {
 public:
  struct Input {
    std::vector<std::byte> head;
    std::vector<Blob> payloads;
  };

  explicit FrameMutator(uint64_t seed) : random_(seed) {}

  RandomFrames& random() {
    return random_;
  }

  // Bytes of no frame, at most with the start of one.
  Input noise(Direction direction) {
    Message bye;
    bye.kind = direction == Direction::kRequest ? Kind::kBye : Kind::kGot;
    Input input{encode({bye}, direction, random_token()).head, {}};
    input.head.resize(random_.chance(4) ? 0 : kPreamble);
    const size_t size = random_.below(200);
    for (size_t i = 0; i < size; ++i) {
      // Many small numbers, of which more is valid.
      const uint64_t value = random_.bits();
      const uint64_t mask = (value & 256U) != 0 ? 255U : 7U;
      input.head.push_back(static_cast<std::byte>(value & mask));
    }
    if (input.head.size() >= kPreamble) {
      set_end(input.head, input.head.size());
    }
    return input;
  }

  // The frame, with up to three changes of the messages, the bytes or the
  // payloads. `other` lends some of its own.
  Input mutated(Frame frame, const Frame& other, Direction direction) {
    while (random_.chance(2)) {
      mutate_frame(frame, other);
    }
    if (frame.empty()) {
      return noise(direction);
    }
    Encoded encoded = encode(frame, direction, random_token());
    Input input{std::move(encoded.head), std::move(encoded.payloads)};
    if (random_.chance(2)) {
      return input;
    }
    if (random_.chance(3)) {
      mutate_payloads(input.payloads);
    }
    while (random_.chance(2)) {
      mutate_bytes(input.head, other, direction);
    }
    return input;
  }

 private:
  static constexpr size_t kEndOffset = 24;
  static constexpr size_t kPreamble = 32;

  static void set_end(std::vector<std::byte>& head, uint64_t end) {
    for (size_t i = 0; i < 8; ++i, end >>= 8U) {
      head[kEndOffset + i] = static_cast<std::byte>(end & 255U);
    }
  }
  static uint64_t end_of(const std::vector<std::byte>& head) {
    uint64_t end = 0;
    for (size_t i = 8; i > 0; --i) {
      end = (end << 8U) | static_cast<uint64_t>(head[kEndOffset + i - 1]);
    }
    return end;
  }

  // -- messages --

  // Near the value or at a limit.
  int64_t number_near(int64_t value) {
    switch (random_.below(8)) {
      case 0:
        return value == INT64_MAX ? 0 : value + 1;
      case 1:
        return value == INT64_MIN ? 0 : value - 1;
      case 2:
        return random_.from(-1, 4);
      case 3:
        return random_.chance(2) ? kMaxCounter - 1 : kMaxCounter;
      case 4:
        return random_.chance(2) ? INT64_MAX : INT64_MIN;
      case 5:
        return random_.counter();
      default:
        return random_.from(0, 20);
    }
  }
  void mutate(int64_t& value) {
    value = number_near(value);
  }
  void mutate(uint64_t& value) {
    value = static_cast<uint64_t>(number_near(static_cast<int64_t>(value)));
  }
  void mutate(int32_t& value) {
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
    if (random_.chance(8)) {
      const std::array<int32_t, 3> values = {
          kMost, -kMost - 1, random_.from(0, 1000000)};
      value = values[random_.below(values.size())];
    } else {
      value = value == kMost ? 0 : std::max(value, 0) + random_.from(-1, 2);
    }
  }
  void mutate(double& value) {
    switch (random_.below(4)) {
      case 0:
        value = std::numeric_limits<double>::infinity();
        break;
      case 1:
        value = std::numeric_limits<double>::quiet_NaN();
        break;
      default:
        value = random_.real();
        break;
    }
  }
  void mutate(SliceId& slice) {
    switch (random_.below(4)) {
      case 0:
        slice = random_.slice(-1);
        break;
      case 1:
        slice.key = random_.chance(2) ? Key(random_.from(0, 4)) : Key("w");
        break;
      default:
        mutate(slice.index);
        break;
    }
  }
  void mutate(Error& error) {
    error = random_.error();
  }
  void mutate(Region& region) {
    switch (random_.below(3)) {
      case 0:
        mutate(region.segment);
        break;
      case 1:
        mutate(region.offset);
        break;
      default:
        mutate(region.size);
        break;
    }
  }
  void mutate(Group& group) {
    if (random_.chance(2)) {
      mutate(group.slice);
    } else {
      mutate(random_.chance(2) ? group.kid : group.round);
    }
  }
  template <class A, class B>
  void mutate(std::pair<A, B>& pair) {
    if (random_.chance(2)) {
      mutate(pair.first);
    } else {
      mutate(pair.second);
    }
  }
  template <class T>
  void mutate(std::optional<T>& value) {
    mutate_optional(value);
  }
  template <class T>
  void mutate(Rare<T>& value) {
    mutate_optional(value);
  }
  template <class Optional>
  void mutate_optional(Optional& value) {
    if (!value) {
      value.emplace();
    } else if (random_.chance(2)) {
      value.reset();
      return;
    }
    mutate(*value);
  }
  template <class T>
  void mutate(std::vector<T>& values) {
    const size_t at = random_.below(values.size() + 1);
    if (at == values.size()) {
      values.resize(random_.below(values.size() + 3));
    } else if (random_.chance(3)) {
      values.insert(values.begin() + static_cast<int64_t>(at), T(values[at]));
    } else {
      mutate(values[at]);
    }
  }
  void mutate(KeySpec& spec) {
    switch (random_.below(5)) {
      case 0:
        mutate(spec.total);
        break;
      case 1:
        mutate(spec.dtype);
        break;
      case 2:
        mutate(spec.item_bytes);
        break;
      case 3:
        spec.whole = !spec.whole;
        break;
      default:
        mutate(spec.sizes);
        break;
    }
  }
  void mutate(Blob& payload) {
    switch (random_.below(4)) {
      case 0:
        payload = {};
        break;
      case 1:
        payload = payload.slice(0, random_.below(payload.size() + 1));
        break;
      case 2:
        payload = random_.bytes(kLongPayload - 1 + random_.below(3));
        break;
      default:
        payload = random_.bytes(payload.size() + random_.below(20));
        break;
    }
  }
  void mutate(Header& header) {
    switch (random_.below(10)) {
      case 0:
        return mutate(header.job);
      case 1:
        return mutate(header.store);
      case 2:
        return mutate(header.rank);
      case 3:
        return mutate(header.server);
      case 4:
        return mutate(header.inc);
      case 5:
        return mutate(header.sinc);
      case 6:
        return mutate(header.committed);
      case 7:
        return mutate(header.floor);
      case 8:
        return mutate(header.phase);
      default:
        return mutate(header.digest);
    }
  }
  // Of the fields those that the kind does not use are not sent: another try.
  void mutate(Message& m) {
    switch (random_.below(32)) {
      case 0:
        m.kind = static_cast<Kind>(random_.below(kNumKinds + 1));
        break;
      case 1:
        return mutate(m.slice);
      case 2:
        return mutate(m.opno);
      case 3:
        return mutate(m.prev);
      case 4:
        return mutate(m.acked);
      case 5:
        return mutate(m.pieces);
      case 6:
        return mutate(m.index);
      case 7:
        return mutate(m.payload);
      case 8:
        return mutate(m.region);
      case 9:
        return mutate(m.priority);
      case 10:
        return mutate(m.gen);
      case 11:
        return mutate(m.snap);
      case 12:
        return mutate(m.spec);
      case 13:
        if (random_.chance(4)) {
          m.is_encoded = !m.is_encoded;
          return;
        }
        return random_.chance(2)
            ? mutate(m.total)
            : mutate(random_.chance(2) ? m.dtype : m.item_bytes);
      case 14:
        return mutate(m.round);
      case 15:
        return mutate(m.base);
      case 16:
        return mutate(m.min_version);
      case 17:
        return mutate(m.have);
      case 18:
        return mutate(m.group);
      case 19:
        return mutate(m.factor);
      case 20:
        return mutate(m.retire);
      case 21:
        return mutate(m.counts);
      case 22:
        return mutate(m.step);
      case 23:
        return mutate(m.version);
      case 24:
        return mutate(m.kid);
      case 25:
        return mutate(m.age);
      case 26:
        return mutate(m.phase);
      case 27:
        return mutate(m.partial);
      case 28:
        return mutate(m.by);
      case 29:
        return mutate(m.missing);
      case 30:
        return mutate(m.error);
      default:
        return random_.chance(2) ? mutate(m.got) : mutate(m.opnos);
    }
  }
  void mutate_frame(Frame& frame, const Frame& other) {
    const auto at = static_cast<int64_t>(random_.below(frame.size() + 1));
    const auto any = [&](const Frame& of) -> const Message& {
      return of[random_.below(of.size())];
    };
    switch (random_.below(8)) {
      case 0:
        if (!other.empty()) {
          Message copy = any(other);
          copy.header = frame.empty() ? copy.header : frame.back().header;
          frame.insert(frame.begin() + at, std::move(copy));
        }
        break;
      case 1:
        if (!frame.empty()) {
          frame.insert(frame.begin() + at, Message(any(frame)));
        }
        break;
      case 2:
        if (at < static_cast<int64_t>(frame.size())) {
          frame.erase(frame.begin() + at);
        }
        break;
      case 3:
        if (!frame.empty() && random_.chance(2)) {
          mutate(frame.back().header);
        }
        break;
      default:
        for (int i = 0; i < 8 && !frame.empty(); ++i) {
          mutate(frame[random_.below(frame.size())]);
        }
        break;
    }
  }

  // -- bytes --

  void mutate_payloads(std::vector<Blob>& payloads) {
    const size_t at = random_.below(payloads.size() + 1);
    if (at == payloads.size()) {
      payloads.push_back(random_.bytes(random_.below(2 * kLongPayload)));
      return;
    }
    switch (random_.below(4)) {
      case 0:
        payloads.erase(payloads.begin() + static_cast<int64_t>(at));
        break;
      case 1:
        payloads[at] = {};
        break;
      case 2:
        std::swap(payloads[at], payloads[random_.below(payloads.size())]);
        break;
      default:
        payloads[at] =
            payloads[at].slice(0, random_.below(payloads[at].size() + 1));
        break;
    }
  }
  void mutate_bytes(
      std::vector<std::byte>& head,
      const Frame& other,
      Direction direction) {
    if (head.size() < kPreamble) {
      return;
    }
    const size_t size = head.size();
    const uint64_t end = end_of(head);
    // Mostly in the messages, where less is refused at once.
    const size_t begin = random_.chance(8) ? 0 : kPreamble;
    const size_t at = begin + random_.below(size - begin + 1);
    const auto from = head.begin() + static_cast<int64_t>(at);
    const size_t length = random_.below(std::min<size_t>(size - at, 12) + 1);
    switch (random_.below(7)) {
      case 0:
        if (at < size) {
          head[at] ^= static_cast<std::byte>(1U << random_.below(8));
        }
        break;
      case 1:
        if (at < size) {
          head[at] = static_cast<std::byte>(random_.bits() & 255U);
        }
        break;
      case 2:
        head.resize(at);
        break;
      case 3:
        head.erase(from, from + static_cast<int64_t>(length));
        break;
      case 4: {
        const std::vector<std::byte> copy(
            from, from + static_cast<int64_t>(length));
        head.insert(from, copy.begin(), copy.end());
        break;
      }
      case 5: { // another integer
        std::vector<std::byte> digits(
            random_.below(11), static_cast<std::byte>(random_.bits() | 128U));
        digits.push_back(static_cast<std::byte>(random_.below(128)));
        head.insert(from, digits.begin(), digits.end());
        break;
      }
      default: {
        if (other.empty()) {
          break;
        }
        const std::vector<std::byte> tail =
            encode(other, direction, random_token()).head;
        const size_t cut = random_.below(tail.size() + 1);
        head.resize(at);
        head.insert(
            head.end(), tail.begin() + static_cast<int64_t>(cut), tail.end());
        break;
      }
    }
    // The messages end where they did, in bytes from the start or from the end.
    if (head.size() >= kPreamble && random_.chance(2)) {
      set_end(head, end + head.size() - size);
    }
  }

  RandomFrames random_;
};

} // namespace torchkv::dist

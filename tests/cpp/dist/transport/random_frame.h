#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "dist/transport/frame.h"

namespace torchkv::dist {

// Of the frames made here.
constexpr Limits kRandomLimits{5, 3, 64};

inline Token random_token() {
  Token token;
  for (size_t i = 0; i < token.size(); ++i) {
    token[i] = static_cast<std::byte>(17 * i + 3);
  }
  return token;
}

// Of exactly that many bytes, so that a sanitizer finds what reads beyond.
inline Blob to_blob(const std::vector<std::byte>& bytes) {
  const std::shared_ptr<std::byte[]> owner(new std::byte[bytes.size()]);
  std::copy(bytes.begin(), bytes.end(), owner.get());
  return {owner, owner.get(), bytes.size()};
}

inline bool same_bytes(const Blob& a, const Blob& b) {
  return a.size() == b.size() &&
      (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

inline bool same_bits(double a, double b) {
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

inline bool same(const Header& a, const Header& b) {
  return a.job == b.job && a.store == b.store && a.rank == b.rank &&
      a.server == b.server && a.inc == b.inc && a.sinc == b.sinc &&
      a.committed == b.committed && a.floor == b.floor && a.phase == b.phase &&
      a.digest == b.digest;
}

inline bool same(const Rare<RowInit>& a, const Rare<RowInit>& b) {
  return a.has_value() == b.has_value() &&
      (!a ||
       (a->id == b->id && same_bits(a->mean, b->mean) &&
        same_bits(a->std, b->std) && same_bits(a->low, b->low) &&
        same_bits(a->high, b->high) && a->seed == b->seed));
}

// All fields but `frame`, which does not travel.
inline bool same(const Message& a, const Message& b) {
  return a.kind == b.kind && same(a.header, b.header) && a.slice == b.slice &&
      are_same(a.list, b.list) && a.prevs == b.prevs && a.count == b.count &&
      a.opno == b.opno && a.prev == b.prev && a.acked == b.acked &&
      a.pieces == b.pieces && a.index == b.index &&
      same_bytes(a.payload, b.payload) && a.region == b.region &&
      a.priority == b.priority && a.gen == b.gen && a.snap == b.snap &&
      a.spec == b.spec && same(a.spec.row_init, b.spec.row_init) &&
      a.total == b.total && a.is_encoded == b.is_encoded &&
      a.dtype == b.dtype && a.item_bytes == b.item_bytes &&
      a.round == b.round && a.base == b.base &&
      a.min_version == b.min_version && a.have == b.have &&
      a.group == b.group && same_bits(a.factor, b.factor) &&
      a.retire == b.retire && a.counts == b.counts && a.step == b.step &&
      a.version == b.version && a.kid == b.kid && a.age == b.age &&
      a.phase == b.phase && same_bits(a.partial, b.partial) && a.by == b.by &&
      a.missing == b.missing && a.error == b.error && a.got == b.got &&
      a.opnos == b.opnos;
}

inline bool same(const Frame& a, const Frame& b) {
  return a.size() == b.size() &&
      std::equal(
             a.begin(),
             a.end(),
             b.begin(),
             [](const Message& left, const Message& right) {
               return same(left, right);
             });
}

inline Direction direction_of(Kind kind) {
  return is_answer(kind) ? Direction::kAnswer : Direction::kRequest;
}

// What encode makes of it, decoded.
inline std::optional<Frame> round_trip(const Message& message) {
  const Direction direction = direction_of(message.kind);
  const Encoded encoded = encode({message}, direction, random_token());
  return decode(
      to_blob(encoded.head),
      encoded.payloads,
      direction,
      random_token(),
      kRandomLimits);
}

// Whether decode accepts it, unchanged.
inline bool survives(const Message& message) {
  const auto frame = round_trip(message);
  return frame && frame->size() == 1 && same(frame->front(), message);
}

// Valid messages with random fields, drawn from a seed: the same everywhere.
class RandomFrames {
 public:
  explicit RandomFrames(uint64_t seed) : engine_(seed) {}

  uint64_t bits() {
    return engine_();
  }
  // Below `end`.
  uint64_t below(uint64_t end) {
    return bits() % end;
  }
  bool chance(uint64_t in) {
    return below(in) == 0;
  }
  // Mostly small, sometimes the largest, of all lengths.
  int64_t counter(int64_t least = 0, int64_t end = kMaxCounter) {
    if (chance(16)) {
      return chance(2) ? least : end - 1;
    }
    const auto value = static_cast<int64_t>(bits() >> (2 + below(62)));
    return value >= least && value < end ? value : least;
  }
  int64_t number() {
    const auto value = static_cast<int64_t>(bits() >> below(64));
    return chance(2) ? value : ~value;
  }
  int32_t from(int32_t least, int32_t end) {
    return least +
        static_cast<int32_t>(below(static_cast<uint64_t>(end - least)));
  }
  std::string text(size_t longest) {
    std::string result(below(longest + 1), '\0');
    for (char& c : result) {
      c = static_cast<char>(bits() & 255U);
    }
    return result;
  }
  Blob bytes(size_t size) {
    std::vector<std::byte> result(size);
    for (auto& byte : result) {
      byte = static_cast<std::byte>(bits() & 255U);
    }
    return to_blob(result);
  }
  double real() {
    const auto magnitude = static_cast<double>(number());
    return chance(4) ? 0.0 : magnitude / static_cast<double>(1 + below(1000));
  }

  SliceId slice(int32_t least_index = 0) {
    SliceId result;
    result.key = chance(2) ? Key(number()) : Key(text(chance(8) ? 300 : 20));
    result.index = from(least_index, kRandomLimits.num_servers);
    return result;
  }
  SliceListPtr list() {
    std::vector<SliceList::Part> parts(1 + below(6));
    for (auto& part : parts) {
      part = {slice().key, counter(0, kMaxElements / 6)};
    }
    return std::make_shared<const SliceList>(std::move(parts));
  }
  Region region() {
    return {bits(), static_cast<uint64_t>(counter()), below(1U << 20U)};
  }
  std::vector<int32_t> ranks() {
    std::vector<int32_t> result(below(kRandomLimits.num_workers));
    for (auto& rank : result) {
      rank = from(0, kRandomLimits.num_workers);
    }
    return result;
  }
  Error error() {
    Error result;
    result.code =
        static_cast<ErrorCode>(from(0, static_cast<int>(kLastErrorCode) + 1));
    result.who = from(-1, kRandomLimits.num_workers);
    if (chance(2)) {
      result.slice = slice(SliceId::kServer);
    }
    result.text = text(chance(2) ? 0 : 50);
    result.missing = ranks();
    return result;
  }
  Counts counts() {
    Counts result(below(5));
    for (auto& count : result) {
      count = {slice(), counter()};
    }
    std::sort(result.begin(), result.end());
    const auto repeated = std::unique(
        result.begin(), result.end(), [](const auto& a, const auto& b) {
          return a.first == b.first;
        });
    result.erase(repeated, result.end());
    return result;
  }
  Header header(Direction direction) {
    Header result;
    result.job = counter();
    result.store = bits();
    result.rank = from(0, kRandomLimits.num_workers);
    result.server = from(0, kRandomLimits.num_servers);
    result.inc = counter();
    result.sinc = number();
    result.committed = counter();
    if (direction == Direction::kRequest) {
      result.floor = counter();
      result.phase = counter();
      result.digest = bits();
    }
    return result;
  }
  Message message(Kind kind) {
    Message result;
    result.kind = kind;
    if (is_operation(kind)) {
      operation(result);
    } else {
      other(result);
    }
    return result;
  }
  // Of any kinds of the direction, with one header.
  Frame frame(Direction direction, size_t num_messages) {
    const Header one = header(direction);
    Frame result;
    while (result.size() < num_messages) {
      const auto kind = static_cast<Kind>(from(0, kNumKinds));
      if (kind == Kind::kGot || direction_of(kind) == direction) {
        result.push_back(message(kind));
        result.back().header = one;
      }
    }
    return result;
  }

 private:
  Blob payload() {
    switch (below(4)) {
      case 0:
        return {};
      case 1:
        return bytes(kLongPayload - 2 + below(4));
      default:
        return bytes(below(80));
    }
  }
  void piece(Message& result) {
    const int32_t least = result.kind == Kind::kValue ? 0 : -1;
    result.pieces = from(least + 1, kRandomLimits.num_pieces + 1);
    result.index = from(least, result.pieces);
    if (result.kind != Kind::kInit && chance(4)) {
      result.region = region();
      result.index = chance(2) ? -1 : result.index;
    } else if (result.index >= 0) {
      result.payload = payload();
    }
  }
  void have(Message& result) {
    result.have.resize(below(5));
    for (auto& index : result.have) {
      index = from(0, kRandomLimits.num_pieces);
    }
  }
  void group(Message& result) {
    if (chance(2)) {
      result.group = Group{slice(), counter(), counter()};
    }
  }
  void operation(Message& result) {
    const Kind kind = result.kind;
    if (kind != Kind::kConfig && kind != Kind::kEnter && kind != Kind::kMeet &&
        kind != Kind::kSnapshot && kind != Kind::kClose) {
      result.slice = slice();
    }
    const bool has_values =
        kind == Kind::kPush || kind == Kind::kPushPull || kind == Kind::kPull;
    if (has_values && chance(3)) {
      result.list = list();
      result.slice = result.list->name();
      result.count = static_cast<int32_t>(result.list->size());
    }
    result.opno = counter(1);
    result.prev = chance(4) ? 0 : counter(0, result.opno);
    if (result.list && chance(2)) {
      result.prevs.resize(result.list->size());
      for (auto& prev : result.prevs) {
        prev = counter(0, result.opno);
      }
    }
    result.acked = counter(0, result.opno + 1);
    result.priority = number();
    result.gen = counter();
    result.snap = counter();
    switch (kind) {
      case Kind::kInit:
        piece(result);
        result.spec = {
            counter(0, kMaxElements + 1),
            from(0, 128),
            from(1, 17),
            chance(2),
            {},
            {}};
        result.spec.sizes.resize(below(5));
        for (auto& size : result.spec.sizes) {
          size = chance(4) ? std::numeric_limits<int64_t>::max() : counter();
        }
        if (chance(3)) {
          result.spec.row_init = RowInit{
              static_cast<RowInit::Id>(below(3)),
              real(),
              real(),
              real(),
              real(),
              number()};
        }
        break;
      case Kind::kPush:
      case Kind::kPushPull:
        piece(result);
        result.total = counter(0, kMaxElements + 1);
        result.is_encoded = chance(4);
        result.dtype = from(0, 128);
        result.item_bytes = from(0, 17);
        result.round = counter();
        result.base = counter();
        if (kind == Kind::kPushPull) {
          have(result);
        }
        group(result);
        break;
      case Kind::kPull:
        piece(result);
        result.region.reset();
        result.round = counter();
        result.min_version = counter();
        have(result);
        break;
      case Kind::kConfig:
        result.payload = payload();
        result.retire = counter();
        break;
      case Kind::kSnapshot:
        result.step = counter();
        result.counts = counts();
        break;
      case Kind::kEnter:
      case Kind::kMeet:
      case Kind::kClose:
        result.counts = counts();
        break;
      case Kind::kNorm:
        result.round = counter();
        group(result);
        break;
      case Kind::kFactor:
        result.round = counter();
        result.factor = real();
        break;
      default:
        break;
    }
  }
  void other(Message& result) {
    const Kind kind = result.kind;
    if ((kind == Kind::kDone || kind == Kind::kValue || kind == Kind::kWait ||
         kind == Kind::kError) &&
        chance(3)) {
      result.count = from(1, kMaxListed + 1);
    }
    switch (result.kind) {
      case Kind::kHeartbeat:
      case Kind::kAlive:
        if (chance(2)) {
          result.error = error();
        }
        break;
      case Kind::kReject:
      case Kind::kFatal:
        result.error = error();
        break;
      case Kind::kError:
        result.opno = counter(1);
        result.error = error();
        break;
      case Kind::kFree:
      case Kind::kFreed:
        result.opnos.resize(below(6));
        for (auto& opno : result.opnos) {
          opno = counter(1);
        }
        break;
      case Kind::kGot:
        result.got.resize(below(6));
        for (auto& got : result.got) {
          got = {counter(1), from(0, kRandomLimits.num_pieces)};
        }
        break;
      case Kind::kWelcome:
        result.gen = counter();
        result.snap = counter();
        result.phase = counter();
        result.payload = payload();
        break;
      case Kind::kExpired:
        result.by = counter();
        break;
      case Kind::kDone:
        result.opno = counter(1);
        result.round = counter();
        result.version = counter();
        result.kid = counter();
        result.age = number();
        result.phase = counter();
        result.partial =
            chance(8) ? std::numeric_limits<double>::infinity() : real();
        break;
      case Kind::kValue:
        result.opno = counter(1);
        piece(result);
        result.round = counter();
        result.version = counter();
        result.kid = counter();
        break;
      case Kind::kWait:
        result.opno = counter(1);
        result.missing = ranks();
        break;
      default:
        break;
    }
  }

  std::mt19937_64 engine_;
};

} // namespace torchkv::dist

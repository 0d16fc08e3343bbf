#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "frame.h"

namespace torchkv::dist {

// Integers are in base 128, least digits first, of which all but the last have
// the highest bit set. Numbers of fixed length have their lowest byte first.
// FrameWriter and FrameReader have the same methods, one for each form of a
// field, so that the functions of frame.cpp describe the format once, for both.

inline size_t align_inline(size_t offset) {
  return (offset + kInlineAlignment - 1) / kInlineAlignment * kInlineAlignment;
}

class FrameWriter {
 public:
  explicit FrameWriter(size_t size_hint) : bytes_(size_hint) {}

  const Limits limits{}; // the reader's count

  void integer(uint64_t value) {
    std::byte* to = room(10);
    size_t size = 0;
    for (; value >= 128; value >>= 7U) {
      to[size++] = static_cast<std::byte>((value & 127U) | 128U);
    }
    to[size++] = static_cast<std::byte>(value);
    size_ += size;
  }
  // Short for small absolute values.
  void signed_integer(int64_t value) {
    const uint64_t twice = static_cast<uint64_t>(value) << 1U;
    integer(value < 0 ? ~twice : twice);
  }
  void counter(int64_t value, int64_t /*least*/ = 0) {
    integer(static_cast<uint64_t>(value));
  }
  // From 0 to `base`, short if near to it.
  void before(int64_t value, int64_t base) {
    integer(static_cast<uint64_t>(base) - static_cast<uint64_t>(value));
  }
  // From `least` to below `end`, which is not less.
  void ranged(int32_t value, int32_t least, int64_t /*end*/) {
    integer(static_cast<uint64_t>(int64_t{value} - least));
  }
  void fixed(uint64_t value, size_t num_bytes = 8) {
    std::byte* to = room(num_bytes);
    for (size_t i = 0; i < num_bytes; ++i, value >>= 8U) {
      to[i] = static_cast<std::byte>(value & 255U);
    }
    size_ += num_bytes;
  }
  void real(double value) {
    fixed(bits(value));
  }
  // Of which most are 0.
  void rare_real(double value) {
    flag(bits(value) != 0);
    if (bits(value) != 0) {
      real(value);
    }
  }
  void flag(bool value) {
    integer(value ? 1 : 0);
  }
  template <class E>
  void enumerator(E value, E /*last*/) {
    integer(static_cast<uint64_t>(value));
  }
  void text(const std::string& value) {
    const size_t size = std::min(value.size(), kMaxTextBytes);
    integer(size);
    raw(value.data(), size);
  }
  // 0 and the number, or 1 + the length and the text.
  void key(const Key& value) {
    if (value.kind() == KeyKind::kInt) {
      integer(0);
      signed_integer(value.id());
    } else {
      integer(value.text().size() + 1);
      raw(value.text().data(), value.text().size());
    }
  }
  // `least_bytes`: of an element.
  template <class T, class Each>
  void list(
      const std::vector<T>& values,
      size_t /*least_bytes*/,
      const Each& each) {
    integer(values.size());
    std::for_each(values.begin(), values.end(), each);
  }
  // Of a std::optional or a Rare.
  template <class T, class Each>
  void optional(const T& value, const Each& each) {
    flag(value.has_value());
    if (value) {
      each(*value);
    }
  }
  void payload(const Blob& value) {
    integer(value.size());
    if (value.size() != 0) {
      payloads_.push_back(&value);
    }
  }
  // Its bytes, for the reader to know again, and these.
  void slices(const SliceListPtr& list, int32_t /*count*/) {
    if (list->encoded.empty()) {
      FrameWriter own(list->num_bytes());
      own.integer(list->size());
      for (const auto& part : list->parts()) {
        own.key(part.key);
        own.counter(part.num_elements);
      }
      list->encoded = own.take();
    }
    integer(list->encoded.size());
    raw(list->encoded.data(), list->encoded.size());
  }
  void expect(bool /*condition*/) {}

  void raw(const void* data, size_t size) {
    if (size != 0) {
      std::memcpy(room(size), data, size);
      size_ += size;
    }
  }
  void align() {
    const size_t size = align_inline(size_) - size_;
    std::memset(room(size), 0, size);
    size_ += size;
  }
  // Those written so far, which are not empty.
  const std::vector<const Blob*>& payloads() const {
    return payloads_;
  }
  size_t size() const {
    return size_;
  }
  void resize(size_t size) {
    size_ = size;
  }
  std::vector<std::byte> take() {
    bytes_.resize(size_);
    return std::move(bytes_);
  }

 private:
  static uint64_t bits(double value) {
    uint64_t result = 0;
    std::memcpy(&result, &value, sizeof(result));
    return result;
  }
  std::byte* room(size_t size) {
    if (bytes_.size() - size_ < size) {
      bytes_.resize(std::max(bytes_.size() * 2, size_ + size));
    }
    return bytes_.data() + size_;
  }
  std::vector<std::byte> bytes_;
  size_t size_ = 0; // of what is written
  std::vector<const Blob*> payloads_;
};

// After a field that is not valid ok() is false and nothing is left to read.
class FrameReader {
 public:
  // Reads from `begin` to `end` of the head; inline payloads follow.
  FrameReader(
      const Blob& head,
      size_t begin,
      size_t end,
      const std::vector<Blob>& payloads,
      const Limits& limits)
      : limits(limits),
        head_(head),
        payloads_(payloads),
        at_(head.data() + begin),
        end_(head.data() + end),
        inline_end_(end) {}

  const Limits& limits;

  bool ok() const {
    return ok_;
  }
  size_t left() const {
    return static_cast<size_t>(end_ - at_);
  }
  // Whether there was nothing more.
  bool finished() const {
    return ok_ && left() == 0 && inline_end_ == head_.size() &&
        payload_ == payloads_.size();
  }
  void expect(bool condition) {
    if (!condition) {
      ok_ = false;
      at_ = end_;
    }
  }

  void integer(uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift < 64 && at_ != end_; shift += 7) {
      const auto digit = static_cast<uint64_t>(*at_++);
      value |= (digit & 127U) << shift;
      if (digit < 128) {
        // One form for each value: no zeros in front, 64 bits.
        expect((digit != 0 || shift == 0) && (shift < 63 || digit == 1));
        return;
      }
    }
    expect(false);
  }
  void signed_integer(int64_t& value) {
    const uint64_t bits = integer();
    value = static_cast<int64_t>((bits & 1U) == 0 ? bits >> 1U : ~(bits >> 1U));
  }
  void counter(int64_t& value, int64_t least = 0) {
    const uint64_t result = integer();
    expect(
        result >= static_cast<uint64_t>(least) &&
        result < static_cast<uint64_t>(kMaxCounter));
    value = ok_ ? static_cast<int64_t>(result) : least;
  }
  void before(int64_t& value, int64_t base) {
    const uint64_t difference = integer();
    expect(difference <= static_cast<uint64_t>(base));
    value = ok_ ? base - static_cast<int64_t>(difference) : 0;
  }
  void ranged(int32_t& value, int32_t least, int64_t end) {
    const uint64_t result = integer();
    expect(result < static_cast<uint64_t>(end - least));
    value = ok_ ? static_cast<int32_t>(least + static_cast<int64_t>(result))
                : least;
  }
  void fixed(uint64_t& value) {
    value = 0;
    if (left() < 8) {
      expect(false);
      return;
    }
    for (unsigned shift = 0; shift < 64; shift += 8) {
      value |= static_cast<uint64_t>(*at_++) << shift;
    }
  }
  void real(double& value) {
    uint64_t bits = 0;
    fixed(bits);
    std::memcpy(&value, &bits, sizeof(bits));
  }
  void rare_real(double& value) {
    bool is_set = false;
    flag(is_set);
    if (is_set) {
      real(value);
      expect(value != 0 || std::signbit(value));
    }
  }
  void flag(bool& value) {
    const uint64_t result = integer();
    expect(result <= 1);
    value = result == 1;
  }
  template <class E>
  void enumerator(E& value, E last) {
    const uint64_t result = integer();
    expect(result <= static_cast<uint64_t>(last));
    value = ok_ ? static_cast<E>(result) : E{};
  }
  void text(std::string& value) {
    const uint64_t size = integer();
    expect(size <= kMaxTextBytes && size <= left());
    value = raw(ok_ ? size : 0);
  }
  void key(Key& value) {
    const uint64_t size = integer();
    if (size == 0) {
      int64_t id = 0;
      signed_integer(id);
      value = id;
      return;
    }
    expect(size - 1 <= kMaxKeyBytes && size - 1 <= left());
    value = raw(ok_ ? size - 1 : 0);
  }
  template <class T, class Each>
  void list(std::vector<T>& values, size_t least_bytes, const Each& each) {
    const uint64_t size = integer();
    expect(size <= left() / least_bytes);
    values.resize(ok_ ? size : 0);
    std::for_each(values.begin(), values.end(), each);
  }
  // And their number.
  void slices(SliceListPtr& list, int32_t& count) {
    list = slices();
    expect(list != nullptr);
    count = list ? static_cast<int32_t>(list->size()) : 1;
  }
  template <class T, class Each>
  void optional(T& value, const Each& each) {
    bool has_value = false;
    flag(has_value);
    if (has_value) {
      each(value.emplace());
    }
  }
  void payload(Blob& value) {
    const uint64_t size = integer();
    if (size >= kLongPayload) {
      expect(payload_ < payloads_.size() && payloads_[payload_].size() == size);
      value = ok_ ? payloads_[payload_++] : Blob();
    } else if (size != 0) {
      const size_t begin = align_inline(inline_end_);
      expect(begin <= head_.size() && size <= head_.size() - begin);
      if (ok_) {
        const std::byte* gap = head_.data() + inline_end_;
        expect(std::all_of(gap, head_.data() + begin, [](std::byte byte) {
          return byte == std::byte{0};
        }));
        value = head_.slice(begin, size);
        inline_end_ = begin + size;
      }
    }
  }

 private:
  uint64_t integer() {
    uint64_t result = 0;
    integer(result);
    return result;
  }
  // Null if they are not valid.
  SliceListPtr slices() {
    const uint64_t size = integer();
    if (!ok_ || size > left()) {
      return nullptr;
    }
    const std::byte* const encoded = at_;
    at_ += size;
    if (limits.lists != nullptr) {
      if (auto known = limits.lists->find(encoded, size)) {
        return known;
      }
    }
    const std::byte* const end = std::exchange(end_, at_);
    at_ = encoded;
    std::vector<SliceList::Part> parts;
    int64_t num_elements = 0;
    list(parts, 2, [&](auto& part) {
      key(part.key);
      counter(part.num_elements);
      expect(part.num_elements <= kMaxElements - num_elements);
      num_elements += ok_ ? part.num_elements : 0;
    });
    expect(left() == 0 && !parts.empty() && parts.size() <= kMaxListed);
    end_ = end;
    if (!ok_) {
      at_ = end_;
      return nullptr;
    }
    auto result = std::make_shared<const SliceList>(std::move(parts));
    if (limits.lists != nullptr) {
      limits.lists->add(encoded, size, result);
    }
    return result;
  }
  std::string raw(size_t size) {
    const auto* begin = reinterpret_cast<const char*>(at_);
    at_ += size;
    return {begin, size};
  }

  const Blob& head_;
  const std::vector<Blob>& payloads_;
  const std::byte* at_;
  const std::byte* end_;
  size_t inline_end_; // of the last inline payload
  size_t payload_ = 0; // the next
  bool ok_ = true;
};

} // namespace torchkv::dist

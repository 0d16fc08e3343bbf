#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/key.h"
#include "../core/rule.h"
#include "protocol/blob.h"

namespace torchkv::dist {

// Numbers, texts and blobs one after the other, for options and snapshots.
// Little endian, as are all machines that PyTorch supports.
class ByteWriter {
 public:
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T>>>
  void add(T number) {
    text_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void add(std::string_view text) {
    add(static_cast<uint64_t>(text.size()));
    text_.append(text);
  }
  void add(const Key& key) {
    const bool is_int = key.kind() == KeyKind::kInt;
    add(static_cast<uint8_t>(is_int));
    if (is_int) {
      add(key.id());
    } else {
      add(std::string_view(key.text()));
    }
  }
  void add(const NumbersByName& numbers) {
    add(static_cast<uint64_t>(numbers.size()));
    for (const auto& [name, number] : numbers) {
      add(std::string_view(name));
      add(number);
    }
  }
  // By reference, as one blob.
  void add(c10::ArrayRef<Blob> pieces) {
    uint64_t size = 0;
    for (const auto& piece : pieces) {
      size += piece.size();
    }
    add(size);
    end_text();
    blobs_.insert(blobs_.end(), pieces.begin(), pieces.end());
  }
  // At least one.
  std::vector<Blob> take() {
    end_text();
    return std::move(blobs_);
  }

 private:
  void end_text() {
    auto owner = std::make_shared<const std::string>(
        std::exchange(text_, std::string()));
    blobs_.emplace_back(owner, owner->data(), owner->size());
  }

  std::string text_;
  std::vector<Blob> blobs_;
};

// Reads what ByteWriter has written; ValueError of `op` where it has not.
class ByteReader {
 public:
  // `op` outlives the reader.
  ByteReader(Blob bytes, const char* op)
      : bytes_(std::move(bytes)),
        rest_(reinterpret_cast<const char*>(bytes_.data()), bytes_.size()),
        op_(op) {}

  template <class T>
  T number() {
    T value;
    take(sizeof(T)).copy(reinterpret_cast<char*>(&value), sizeof(T));
    return value;
  }
  std::string_view text() {
    return take(number<uint64_t>());
  }
  // Of elements that follow, each of at least a byte.
  uint64_t count() {
    const auto count = number<uint64_t>();
    check(count <= rest_.size());
    return count;
  }
  Key key() {
    return number<uint8_t>() != 0 ? Key(number<int64_t>())
                                  : Key(std::string(text()));
  }
  NumbersByName numbers() {
    NumbersByName result;
    for (uint64_t i = count(); i > 0; --i) {
      const std::string name(text());
      result[name] = number<double>();
    }
    return result;
  }
  // By reference.
  Blob blob() {
    const std::string_view bytes = text();
    return {bytes_.owner(), bytes.data(), bytes.size()};
  }
  void check(bool condition) const {
    TORCH_CHECK_VALUE(condition, op_, ": the data is damaged");
  }
  void end() const {
    check(rest_.empty());
  }

 private:
  std::string_view take(uint64_t size) {
    check(size <= rest_.size());
    const std::string_view result = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return result;
  }

  const Blob bytes_;
  std::string_view rest_;
  const char* op_;
};

} // namespace torchkv::dist

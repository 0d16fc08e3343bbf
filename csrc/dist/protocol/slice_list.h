#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "blob.h"
#include "slice.h"

namespace torchkv::dist {

// Slices that one message names: of keys that have one slice, on one server. An
// operation on a list is short for one on each slice, in this order, with
// numbers that follow each other: either side may take it apart at any time.
// Immutable.
class SliceList {
 public:
  struct Part {
    Key key = 0;
    int64_t num_elements = 0;

    friend bool operator==(const Part& a, const Part& b) {
      return a.num_elements == b.num_elements && a.key == b.key;
    }
  };

  // REQUIRES: not empty; no key twice, as far as this process makes lists.
  explicit SliceList(std::vector<Part> parts) : parts_(std::move(parts)) {
    begins_.reserve(parts_.size());
    for (const auto& part : parts_) {
      begins_.push_back(num_elements_);
      num_elements_ += part.num_elements;
      num_bytes_ += num_bytes_of(part.key);
    }
  }

  // That a part takes in a message, about.
  static size_t num_bytes_of(const Key& key) {
    constexpr size_t kNumbers = 12;
    return kNumbers + (key.kind() == KeyKind::kStr ? key.text().size() : 0);
  }

  size_t size() const {
    return parts_.size();
  }
  const std::vector<Part>& parts() const {
    return parts_;
  }
  SliceId slice(size_t i) const {
    return {parts_[i].key, 0};
  }
  // Of the values one after the other, in elements.
  int64_t begin(size_t i) const {
    return begins_[i];
  }
  int64_t num_elements(size_t i) const {
    return parts_[i].num_elements;
  }
  int64_t num_elements() const {
    return num_elements_;
  }
  // The `i`th of values that stand one after the other, in elements of so many
  // bytes.
  Blob part_of(const Blob& values, size_t i, size_t item_bytes) const {
    return values.slice(
        static_cast<size_t>(begins_[i]) * item_bytes,
        static_cast<size_t>(parts_[i].num_elements) * item_bytes);
  }
  // What operations on it have as their slice.
  SliceId name() const {
    return {parts_[0].key, SliceId::kList};
  }
  // That all parts take in a message, about.
  size_t num_bytes() const {
    return num_bytes_;
  }

  friend bool operator==(const SliceList& a, const SliceList& b) {
    return a.parts_ == b.parts_;
  }

  // The encoded list, which the transport of the process that has made it keeps
  // here.
  mutable std::vector<std::byte> encoded;

 private:
  std::vector<Part> parts_;
  std::vector<int64_t> begins_;
  int64_t num_elements_ = 0;
  size_t num_bytes_ = 0;
};
using SliceListPtr = std::shared_ptr<const SliceList>;

// Of numbers of a list's slices: of the `i`th, where they follow the first
// one's unless they are listed.
inline int64_t number_of(
    int64_t first,
    const std::vector<int64_t>& listed,
    size_t i) {
  return listed.empty() ? first + static_cast<int64_t>(i) : listed[i];
}
// What is to be listed.
inline std::vector<int64_t> unless_consecutive(std::vector<int64_t> numbers) {
  for (size_t i = 1; i < numbers.size(); ++i) {
    if (numbers[i] != numbers[0] + static_cast<int64_t>(i)) {
      return numbers;
    }
  }
  return {};
}

// Whether these are the same lists; or both null.
inline bool are_same(const SliceListPtr& a, const SliceListPtr& b) {
  return a == b || (a && b && *a == *b);
}

} // namespace torchkv::dist

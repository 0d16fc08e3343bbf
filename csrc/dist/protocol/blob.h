#pragma once

#include <c10/util/SmallVector.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace torchkv::dist {

// Bytes that are shared, never copied: copies of a blob refer to one memory,
// which lives as long as any of them.
class Blob {
 public:
  Blob() = default;
  // `owner` keeps the memory.
  Blob(std::shared_ptr<const void> owner, const void* data, size_t size)
      : owner_(std::move(owner)),
        data_(static_cast<const std::byte*>(data)),
        size_(size) {}

  const std::byte* data() const {
    return data_;
  }
  size_t size() const {
    return size_;
  }
  const std::shared_ptr<const void>& owner() const {
    return owner_;
  }
  // REQUIRES: within this blob.
  Blob slice(size_t offset, size_t size) const {
    return {owner_, data_ + offset, size};
  }

 private:
  std::shared_ptr<const void> owner_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The pieces of a value, mostly one.
using Blobs = c10::SmallVector<Blob, 1>;

} // namespace torchkv::dist

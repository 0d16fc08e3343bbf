#pragma once

#include <cstddef>

#include "../core/export.h"

namespace torchkv {

// Memory that can be resized. From 8 MiB on, resizing does not copy pages, and
// keeps them huge where the system has such pages: std::realloc splits them
// when it moves memory. Smaller memory, and systems other than Linux, use
// std::realloc. Not thread-safe.
class TORCHKV_API GrowingMemory {
 public:
  GrowingMemory() = default;
  ~GrowingMemory();
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  // Null if nothing was allocated. Aligned as by std::malloc.
  void* data() const {
    return data_;
  }
  // Keeps the first bytes; others are not initialized. May move the memory.
  // std::bad_alloc if there is not enough of it; nothing has changed then.
  void resize(size_t num_bytes);

 private:
  void resize_pages(size_t num_bytes);
  void copy_to(void* data, size_t num_bytes);
  void free();

  void* data_ = nullptr;
  size_t num_bytes_ = 0;
  bool is_mapped_ = false; // then of num_bytes_, a number of huge pages
};

} // namespace torchkv

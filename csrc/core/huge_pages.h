#pragma once

#include <cstddef>
#include <memory>

#include "export.h"

namespace torchkv {

// Asks the system to use huge pages for memory of 8 MiB or more that has not
// been written yet: the first write of small pages takes longer than a copy,
// and random reads wait for the page table. Does nothing where that is not
// supported. Any thread.
TORCHKV_API void use_huge_pages(void* data, size_t num_bytes);

// For containers that become large.
template <typename T>
struct HugePageAllocator : std::allocator<T> {
  HugePageAllocator() = default;
  template <typename U>
  HugePageAllocator(const HugePageAllocator<U>& /*other*/) {} // NOLINT

  template <typename U>
  struct rebind { // NOLINT(readability-identifier-naming): the standard's name
    using other = HugePageAllocator<U>;
  };

  T* allocate(size_t count) {
    T* const data = std::allocator<T>::allocate(count);
    use_huge_pages(data, count * sizeof(T));
    return data;
  }
};

} // namespace torchkv

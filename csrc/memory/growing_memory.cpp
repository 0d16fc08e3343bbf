#include "growing_memory.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

#include "../core/huge_pages.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torchkv {
namespace {

#ifdef __linux__
constexpr size_t kPage = size_t{2} << 20U; // a huge page of x86-64
constexpr size_t kLeast = 4 * kPage; // smaller memory is on the heap

// Memory at the beginning of a huge page, or with PROT_NONE, addresses for it;
// null if there is none.
void* map_pages(size_t num_bytes, int protection) {
  void* const found = mmap(
      nullptr,
      num_bytes + kPage,
      protection,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (found == MAP_FAILED) {
    return nullptr;
  }
  auto* const first = static_cast<char*>(found);
  const size_t before =
      (kPage - reinterpret_cast<uintptr_t>(found) % kPage) % kPage;
  if (before != 0) {
    munmap(first, before);
  }
  munmap(first + before + num_bytes, kPage - before);
  return first + before;
}

// Moves or resizes pages without a copy; null if that is not possible.
void* remap_pages(void* data, size_t num_bytes_before, size_t num_bytes) {
  void* result = mremap(data, num_bytes_before, num_bytes, /*flags=*/0);
  if (result != MAP_FAILED) {
    return result;
  }
  // From the beginning of a huge page to that of another, so that these move as
  // a whole. After an error, the addresses may be another thread's already:
  // they are not unmapped.
  void* const to = map_pages(num_bytes, PROT_NONE);
  if (to != nullptr) {
    result = mremap(
        data, num_bytes_before, num_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, to);
  }
  if (result == MAP_FAILED) {
    result = mremap(data, num_bytes_before, num_bytes, MREMAP_MAYMOVE);
  }
  return result == MAP_FAILED ? nullptr : result;
}
#endif

} // namespace

GrowingMemory::~GrowingMemory() {
  free();
}

void GrowingMemory::free() {
#ifdef __linux__
  if (is_mapped_) {
    munmap(data_, num_bytes_);
    return;
  }
#endif
  std::free(data_);
}

void GrowingMemory::resize(size_t num_bytes) {
  if (num_bytes > std::numeric_limits<size_t>::max() / 2) {
    throw std::bad_alloc();
  }
#ifdef __linux__
  if (num_bytes >= kLeast) {
    resize_pages((num_bytes + kPage - 1) / kPage * kPage);
    return;
  }
#endif
  void* const before = is_mapped_ ? nullptr : data_;
  void* const data = std::realloc(before, std::max(num_bytes, size_t{1}));
  if (data == nullptr) {
    throw std::bad_alloc();
  }
#ifdef __linux__
  if (is_mapped_) {
    copy_to(data, num_bytes);
  }
#endif
  data_ = data;
  num_bytes_ = num_bytes;
  is_mapped_ = false;
}

#ifdef __linux__
void GrowingMemory::resize_pages(size_t num_bytes) {
  void* data = is_mapped_ ? remap_pages(data_, num_bytes_, num_bytes) : nullptr;
  if (data == nullptr) {
    data = map_pages(num_bytes, PROT_READ | PROT_WRITE);
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    copy_to(data, num_bytes);
  }
  use_huge_pages(data, num_bytes);
  data_ = data;
  num_bytes_ = num_bytes;
  is_mapped_ = true;
}

// And frees the memory that was copied.
void GrowingMemory::copy_to(void* data, size_t num_bytes) {
  const size_t num_kept = std::min(num_bytes, num_bytes_);
  if (num_kept != 0) {
    std::memcpy(data, data_, num_kept);
  }
  free();
}
#endif

} // namespace torchkv

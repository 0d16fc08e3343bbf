#include "huge_pages.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace torchkv {

void use_huge_pages(
    [[maybe_unused]] void* data,
    [[maybe_unused]] size_t num_bytes) {
#ifdef MADV_HUGEPAGE
  constexpr size_t kLeast = size_t{8} << 20U;
  constexpr uintptr_t kPage = uintptr_t{2} << 20U;
  if (num_bytes < kLeast) {
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const size_t before = (kPage - begin % kPage) % kPage; // the first whole page
  const size_t size = (num_bytes - before) / kPage * kPage;
  // Only advice: a kernel without huge pages refuses it.
  madvise(static_cast<char*>(data) + before, size, MADV_HUGEPAGE);
#endif
}

} // namespace torchkv

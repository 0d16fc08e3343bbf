#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "../../core/export.h"
#include "../protocol/slice_list.h"

namespace torchkv::dist {

// Lists of slices that have been decoded: most frames name the same again.
class TORCHKV_API ListCache {
 public:
  // Null if it is not known.
  SliceListPtr find(const std::byte* encoded, size_t size) const;
  // Instead of the oldest ones, where they are many.
  void add(const std::byte* encoded, size_t size, SliceListPtr list);

 private:
  static constexpr size_t kMaxBytes = size_t{4} << 20U; // of all
  struct Known {
    std::vector<std::byte> encoded;
    SliceListPtr list;
  };
  std::deque<Known> known_; // the oldest first
  size_t num_bytes_ = 0;
};

} // namespace torchkv::dist

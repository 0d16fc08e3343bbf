#include "outs.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace torchkv {
namespace {

// The memory from a tensor's first element to behind its last.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
};

Extent extent_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  int64_t count = tensor.numel();
  if (count != 0 && !tensor.is_non_overlapping_and_dense()) {
    count = 1;
    for (int64_t i = 0; i < tensor.dim(); ++i) {
      count += (tensor.size(i) - 1) * tensor.stride(i);
    }
  }
  return {data, data + count * static_cast<int64_t>(tensor.element_size())};
}

} // namespace

bool may_overlap(c10::ArrayRef<Item> items) {
  c10::SmallVector<Extent, 4> extents;
  bool ascending = true;
  extents.reserve(items.size());
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      extents.push_back(extent_of(out));
      const size_t n = extents.size();
      ascending =
          ascending && (n == 1 || extents[n - 2].end <= extents[n - 1].begin);
    }
  }
  if (ascending) {
    return false;
  }
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  const auto* overlap = std::adjacent_find(
      extents.begin(), extents.end(), [](const auto& a, const auto& b) {
        return a.end > b.begin;
      });
  return overlap != extents.end();
}

void bump_versions(c10::ArrayRef<Item> items) {
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      if (!out.is_inference()) {
        out.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
}

} // namespace torchkv

#include "outs.h"

#include <c10/util/SmallVector.h>

#include <algorithm>

namespace torchkv {
namespace {

// The memory from a tensor's first element to the end of its last.
struct Span {
  const char* begin = nullptr;
  const char* end = nullptr;
};

Span span_of(const at::Tensor& tensor) {
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
  c10::SmallVector<Span, 4> spans;
  bool ascending = true;
  spans.reserve(items.size());
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      spans.push_back(span_of(out));
      const size_t n = spans.size();
      ascending =
          ascending && (n == 1 || spans[n - 2].end <= spans[n - 1].begin);
    }
  }
  if (ascending) {
    return false;
  }
  std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  const auto* overlap = std::adjacent_find(
      spans.begin(), spans.end(), [](const auto& a, const auto& b) {
        return a.end > b.begin;
      });
  return overlap != spans.end();
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

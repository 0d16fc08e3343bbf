#include "written_outs.h"

#include <algorithm>
#include <vector>

#include "../memory/layout.h"
#include "batch.h"

namespace torchkv {
namespace {

// Smaller ones are still in the caches when they are copied out.
constexpr size_t kMinBytes = size_t{1} << 20U;

struct SpanOfKey {
  Span span;
  int64_t number; // of the key
};

std::vector<SpanOfKey> spans_of(const Tensors& tensors) {
  std::vector<SpanOfKey> spans;
  spans.reserve(tensors.flat.size());
  for (int64_t i = 0; i < tensors.size(); ++i) {
    for (const auto& tensor : tensors.of(i)) {
      if (tensor.numel() != 0) {
        spans.push_back({span_of(tensor), i});
      }
    }
  }
  return spans;
}

} // namespace

bool can_write_with_sums(const Call& call, const Entries& entries) {
  if (call.outs == nullptr || call.values == nullptr) {
    return false;
  }
  size_t num_bytes = 0;
  for (const auto& out : call.outs->flat) {
    num_bytes += out.nbytes();
  }
  const auto is_row_sparse = [](const EntryPtr& entry) {
    return entry->rows != nullptr;
  };
  if (num_bytes < kMinBytes || has_repeats(entries) ||
      std::any_of(entries.begin(), entries.end(), is_row_sparse)) {
    return false;
  }
  std::vector<SpanOfKey> outs = spans_of(*call.outs);
  std::sort(outs.begin(), outs.end(), [](const auto& a, const auto& b) {
    return a.span.begin < b.span.begin;
  });
  for (size_t i = 1; i < outs.size(); ++i) {
    if (outs[i - 1].span.end > outs[i].span.begin) {
      return false;
    }
  }
  for (const auto& [value, number] : spans_of(*call.values)) {
    // The first out that ends behind the beginning of the value.
    auto out = std::partition_point(outs.begin(), outs.end(), [&](auto& of) {
      return of.span.end <= value.begin;
    });
    for (; out != outs.end() && out->span.begin < value.end; ++out) {
      const bool is_itself = out->number == number &&
          out->span.begin == value.begin && out->span.end == value.end;
      if (!is_itself) {
        return false;
      }
    }
  }
  return true;
}

} // namespace torchkv

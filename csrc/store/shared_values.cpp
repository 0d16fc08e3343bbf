#include "shared_values.h"

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "../core/errors.h"
#include "../memory/layout.h"

namespace torchkv {
namespace {

// A shared value, and where it is.
struct Shared {
  const Entry* entry; // null: of the call that is checked
  const Key* key;
  at::Tensor value;
  Span span;
};
using SharedValues = std::vector<Shared>;

// If the entry's value is shared and has elements.
void add_shared_value_of(Entry& entry, SharedValues& values) {
  const std::lock_guard lock(entry.mutex);
  if (entry.is_shared && entry.meta.num_elements != 0) {
    const at::Tensor& value = entry.slices[0].value;
    values.push_back({&entry, &entry.key, value, span_of(value)});
  }
}

// In the order of memory. REQUIRES: these do not overlap.
void sort(SharedValues& values) {
  std::sort(values.begin(), values.end(), [](const auto& a, const auto& b) {
    return a.span.begin < b.span.begin;
  });
}

// The first of the sorted values that overlaps with a span; null if none does.
const Shared* overlapping(const SharedValues& values, const Span& span) {
  const auto it = std::upper_bound(
      values.begin(),
      values.end(),
      span.begin,
      [](const char* begin, const auto& value) {
        return begin < value.span.end;
      });
  return it == values.end() || it->span.begin >= span.end ? nullptr : &*it;
}

bool is_same(const at::Tensor& a, const at::Tensor& b) {
  return a.const_data_ptr() == b.const_data_ptr() &&
      a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
      is_plain(a) && same_layout(a, b);
}

void check_memory(const char* op, const Shared& shared) {
  const Where where{op, *shared.key};
  const size_t needed = needed_storage_bytes(shared.value);
  TORCHKV_CHECK_VALUE(
      needed <= shared.value.storage().nbytes(),
      where,
      "expected the shared tensor's storage to have at least ",
      needed,
      " bytes, but it was resized to ",
      shared.value.storage().nbytes(),
      " bytes");
}

} // namespace

void check_shareable(
    const Call& call,
    const std::vector<EntryPtr>& others,
    bool only_cpu) {
  SharedValues values;
  const std::unordered_set<Key, KeyHash> replaced(
      call.keys.list.begin(), call.keys.list.end());
  for (const auto& entry : others) {
    if (replaced.count(entry->key) == 0) {
      add_shared_value_of(*entry, values);
    }
  }
  for (size_t i = 0; i < call.keys.list.size(); ++i) {
    const at::Tensor& value = call.values->flat[i];
    const Where where{call.op, call.keys.list[i]};
    TORCHKV_CHECK_VALUE(
        is_plain(value) && value.is_non_overlapping_and_dense(),
        where,
        "expected a dense tensor to share, but got one of strides ",
        value.strides(),
        is_plain(value) ? "" : " with a lazy operation");
    TORCHKV_CHECK_VALUE(
        !only_cpu || value.device().is_cpu(),
        where,
        "expected a tensor in CPU memory, where a 'local' store has its "
        "values, to share, but got one on ",
        value.device(),
        "; create a 'device' store");
    if (value.numel() != 0) {
      values.push_back({nullptr, &where.key, value, span_of(value)});
    }
  }
  sort(values);
  for (size_t i = 1; i < values.size(); ++i) {
    const bool overlap = values[i - 1].span.end > values[i].span.begin;
    const Where where{
        call.op,
        values[i].entry == nullptr ? *values[i].key : *values[i - 1].key};
    TORCHKV_CHECK_VALUE(
        !overlap,
        where,
        "expected a tensor to share with memory of its own, but got one that "
        "overlaps with another key's");
  }
}

void check_shared(const Call& call, const Entries& entries, bool takes_itself) {
  SharedValues values;
  for (const auto& entry : entries) {
    add_shared_value_of(*entry, values);
  }
  if (values.empty()) {
    return;
  }
  for (const auto& shared : values) {
    check_memory(call.op, shared);
  }
  sort(values); // a repeated key's are equal
  for (const auto* tensors : {call.values, call.outs}) {
    if (tensors == nullptr) {
      continue;
    }
    for (size_t i = 0; i < entries.size(); ++i) {
      for (const auto& tensor : tensors->of(static_cast<int64_t>(i))) {
        const Shared* const shared = tensor.numel() == 0
            ? nullptr
            : overlapping(values, span_of(tensor));
        const Where where{call.op, entries[i]->key};
        TORCHKV_CHECK_VALUE(
            shared == nullptr ||
                (takes_itself && shared->entry == entries[i].get() &&
                 is_same(tensor, shared->value)),
            where,
            "expected a tensor outside of the memory that key ",
            shared == nullptr ? entries[i]->key : *shared->key,
            " shares with the store, but got one that overlaps with it; clone "
            "it");
      }
    }
  }
}

void refuse_sharing(const Call& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.options.share,
      call.op,
      ": expected share=False, as this store has its values on servers, but "
      "got True ",
      call.keys.context());
}

c10::SmallVector<at::Tensor, 1> without_itself(
    const Entry& entry,
    c10::ArrayRef<at::Tensor> outs) {
  c10::SmallVector<at::Tensor, 1> result;
  for (const auto& out : outs) {
    if (!is_same(out, entry.slices[0].value)) {
      result.push_back(out);
    }
  }
  return result;
}

} // namespace torchkv

#include "parts.h"

#include <utility>

#include "layout.h"

namespace torchkv {

Parts::Parts(Runtime& runtime, c10::ArrayRef<Item> items) {
  list_.reserve(items.size());
  for (const auto& item : items) {
    if (item.entry->slices.size() == 1) {
      list_.push_back(
          {item.entry,
           &item.entry->slices[0],
           item.values,
           item.outs,
           item.step});
    } else {
      add_sharded(runtime, item);
    }
  }
}

Parts::Storage& Parts::storage() {
  if (storage_ == nullptr) {
    storage_ = std::make_unique<Storage>();
  }
  return *storage_;
}

const at::Tensor& Parts::set_value(Part& part, at::Tensor value) {
  Storage& storage = this->storage();
  const at::Tensor& kept = storage.tensors.emplace_back(std::move(value));
  part.values =
      storage.values.emplace_back(c10::SmallVector<Value, 4>{Value(&kept)});
  return kept;
}

void Parts::set_outs(Part& part, c10::SmallVector<at::Tensor, 4> outs) {
  part.outs = storage().outs.emplace_back(std::move(outs));
}

void Parts::add_sharded(Runtime& runtime, const Item& item) {
  Entry& entry = *item.entry;
  c10::SmallVector<Value, 8> whole;
  for (const auto& value : item.values) {
    const at::Tensor* const tensor = value.dense();
    if (tensor == nullptr || has_layout_of(entry, *tensor)) {
      whole.push_back(value);
      continue;
    }
    const at::Tensor& copy = storage().tensors.emplace_back(runtime.allocate(
        entry.meta.sizes,
        entry.strides,
        tensor->scalar_type(),
        tensor->device()));
    runtime.copy(copy, *tensor);
    whole.emplace_back(&copy);
  }
  c10::SmallVector<const at::Tensor*, 8> outs;
  for (const auto& out : item.outs) {
    if (out.scalar_type() == entry.meta.dtype && has_layout_of(entry, out)) {
      outs.push_back(&out);
    } else {
      whole_outs_.push_back({&entry, &out});
    }
  }
  Storage& storage = this->storage();
  for (auto& slice : entry.slices) {
    auto& values = storage.values.emplace_back();
    for (Value value : whole) {
      if (const at::Tensor* const tensor = value.dense()) {
        value.data = &storage.tensors.emplace_back(
            part_of(*tensor, slice.begin, slice.end));
      }
      value.begin = slice.begin;
      values.push_back(value);
    }
    auto& out_views = storage.outs.emplace_back();
    for (const auto* out : outs) {
      out_views.push_back(part_of(*out, slice.begin, slice.end));
    }
    list_.push_back({&entry, &slice, values, out_views, item.step});
  }
}

} // namespace torchkv

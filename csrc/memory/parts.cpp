#include "parts.h"

#include "accumulation_type.h"
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
      add_cut(runtime, item);
    }
  }
}

void Parts::add_cut(Runtime& runtime, const Item& item) {
  Entry& entry = *item.entry;
  c10::SmallVector<at::Tensor, 8> alike;
  for (const auto& value : item.values) {
    const at::Tensor& tensor = *value.data;
    if (lies_as(entry, tensor)) {
      alike.push_back(tensor);
      continue;
    }
    alike.push_back(runtime.allocate(
        entry.meta.sizes,
        entry.strides,
        tensor.scalar_type(),
        tensor.device()));
    if (is_plain_cpu(tensor)) {
      // Also in a forked child, where PyTorch's copy waits for lost threads.
      kernels::cpu::sum_strided(
          value, alike.back(), accumulation_type(value, tensor.scalar_type()));
    } else {
      runtime.copy(alike.back(), tensor);
    }
  }
  c10::SmallVector<const at::Tensor*, 8> outs;
  for (const auto& out : item.outs) {
    if (out.scalar_type() == entry.meta.dtype && lies_as(entry, out)) {
      outs.push_back(&out);
    } else {
      whole_outs_.push_back({&entry, &out});
    }
  }
  if (views_ == nullptr) {
    views_ = std::make_unique<Views>();
  }
  for (auto& slice : entry.slices) {
    auto& values = views_->values.emplace_back();
    for (size_t i = 0; i < alike.size(); ++i) {
      views_->tensors.push_back(part_of(alike[i], slice.begin, slice.end));
      values.push_back({item.values[i].form, &views_->tensors.back()});
    }
    auto& out_views = views_->outs.emplace_back();
    for (const auto* out : outs) {
      out_views.push_back(part_of(*out, slice.begin, slice.end));
    }
    list_.push_back({&entry, &slice, values, out_views, item.step});
  }
}

} // namespace torchkv

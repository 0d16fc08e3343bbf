#include "batch.h"

#include <ATen/ops/empty.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../memory/layout.h"
#include "../memory/row_ids.h"
#include "../memory/row_slices.h"
#include "compressed_values.h"
#include "row_values.h"

namespace torchkv {

bool has_repeats(const Entries& entries) {
  // Most calls name their keys in the order of init.
  const auto is_not_after = [](const EntryPtr& a, const EntryPtr& b) {
    return a->ordinal >= b->ordinal;
  };
  if (std::adjacent_find(entries.begin(), entries.end(), is_not_after) ==
      entries.end()) {
    return false;
  }
  c10::SmallVector<const Entry*, 8> sorted;
  for (const auto& entry : entries) {
    sorted.push_back(entry.get());
  }
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
}

Groups::Groups(
    Entries entries,
    const Tensors& tensors,
    CompressionPtr compression,
    const Tensors* outs)
    : entries_(std::move(entries)),
      tensors_(tensors),
      compression_(std::move(compression)),
      outs_(outs) {
  if (has_repeats(entries_)) {
    merge();
  }
}

void Groups::merge() {
  ska::flat_hash_map<const Entry*, size_t> group_of;
  Entries distinct;
  std::vector<std::vector<int64_t>> groups; // of indices in tensors_.flat
  for (size_t i = 0; i < entries_.size(); ++i) {
    const auto [it, inserted] =
        group_of.emplace(entries_[i].get(), groups.size());
    if (inserted) {
      distinct.push_back(entries_[i]);
      groups.emplace_back();
    }
    const auto number = static_cast<int64_t>(i);
    for (int64_t j = tensors_.begin(number); j < tensors_.ends[i]; ++j) {
      groups[it->second].push_back(j);
    }
  }
  entries_ = std::move(distinct);
  Tensors& merged = merged_.emplace();
  for (const auto& group : groups) {
    for (const int64_t j : group) {
      merged.append(
          tensors_.flat[j],
          tensors_.encodings.empty()
              ? nullptr
              : tensors_.encodings[static_cast<size_t>(j)]);
    }
    merged.end_group();
  }
}

// Fills the arrays member by member: copies of whole structs that have just
// been written would wait for these writes.
Batch::Batch(const Groups& groups, size_t begin, size_t end)
    : groups_(groups), begin_(begin), compression_(groups.compression()) {
  const Tensors& tensors = groups.tensors();
  auto index = static_cast<size_t>(tensors.begin(static_cast<int64_t>(begin)));
  items.resize(end - begin);
  values_.resize(static_cast<size_t>(tensors.ends[end - 1]) - index);
  Value* value = values_.data();
  for (Item& item : items) {
    item.entry = groups.entries()[begin].get();
    const Value* const own = value;
    const auto last = static_cast<size_t>(tensors.ends[begin++]);
    for (; index < last; ++index, ++value) {
      value->data = &tensors.flat[index];
      if (!tensors.encodings.empty()) {
        value->encoding = tensors.encodings[index].get();
      }
    }
    item.values = c10::ArrayRef<Value>(own, value);
  }
  if (const Tensors* const outs = groups.outs()) {
    auto number = static_cast<int64_t>(begin_);
    for (Item& item : items) {
      item.outs = outs->of(number++);
    }
  }
}

void Batch::compress(Slices& slices) {
  if (compression_ == nullptr) {
    return;
  }
  const uint64_t generation = compression_->generation();
  Value* value = values_.data();
  for (Item& item : items) {
    Entry& entry = *item.entry;
    Value* const own = value;
    value += item.values.size();
    const Codec& codec = compression_->get().codec_of(entry.key);
    renew_residuals(entry, *compression_);
    if (codec.id == Codec::Id::kNone ||
        std::any_of(own, value, [](const Value& pushed) {
          return pushed.dense() == nullptr;
        })) {
      continue;
    }
    if (codec.has_feedback()) {
      entry.residual_generation =
          std::max(entry.residual_generation, generation);
    }
    const bool is_encoded = are_in_cpu_memory(entry, item.values);
    for (Value* pushed = own; pushed != value; ++pushed) {
      if (!has_layout_of(entry, *pushed->data)) {
        pushed->data =
            &tensors_.emplace_back(slices.laid_out_as(entry, *pushed->data));
      }
      if (is_encoded) {
        const auto position = static_cast<size_t>(pushed - own);
        pushed->encoding = &compressed_.emplace_back(
            torchkv::compress(codec, entry, position, *pushed->data, slices));
      }
    }
    if (!is_encoded) {
      item.values = compress_on_devices(codec, entry, own, value, slices);
    }
  }
  for (auto* const list : {&stepping, &accumulating}) {
    const Item* from = items.begin();
    for (Item& item : *list) { // in the order of the items
      while (from->entry != item.entry) {
        ++from;
      }
      item.values = from->values;
    }
  }
}

// Returns what is to be added up instead. What has been accumulated comes
// before the first value, and sums are made left to right.
c10::ArrayRef<Value> Batch::compress_on_devices(
    const Codec& codec,
    Entry& entry,
    Value* begin,
    Value* end,
    Slices& slices) {
  const bool may_add = entry.num_accumulated == 0;
  Value* result = begin;
  size_t position = 0;
  for (Value* first = begin; first != end;) {
    const c10::Device device = first->device();
    const bool packs = leaves_as_codes(codec, entry, device);
    const bool adds = !packs && may_add && first == begin;
    Value* const last = !packs && !adds
        ? first + 1
        : std::find_if(first + 1, end, [&](const Value& value) {
            return value.device() != device;
          });
    const c10::ArrayRef<Value> values(first, last);
    c10::SmallVector<at::Tensor, 4> residuals;
    if (packs) {
      SentCodes sent =
          torchkv::compress_to_codes(codec, entry, position, values, slices);
      for (size_t i = 0; i < values.size(); ++i) {
        DeviceCodes& codes = codes_.emplace_back();
        codes.sizes = entry.meta.sizes;
        codes.dtype = residual_dtype(entry.meta);
        codes.codec = codec;
        first[i].encoding = &codes;
        first[i].data = &tensors_.emplace_back(std::move(sent.codes[i]));
      }
      residuals = std::move(sent.residuals);
    } else {
      SentSum sent =
          torchkv::compress_to_dense(codec, entry, position, values, slices);
      last[-1].data = &tensors_.emplace_back(std::move(sent.sum));
      residuals = std::move(sent.residuals);
      result = adds ? last - 1 : result;
    }
    for (auto& residual : residuals) {
      sent_.push_back({end, position++, std::move(residual)});
    }
    first = last;
  }
  return {result, end};
}

void Batch::find_rows(const RuleSpec* rule) {
  Value* value = values_.data();
  const RuleStep* step = steps.data();
  for (const Item& item : items) {
    Entry& entry = *item.entry;
    rule = steps.empty() ? rule : &step++->rule;
    Value* const own = value;
    value += item.values.size();
    if (entry.rows == nullptr) {
      continue;
    }
    for (Value* pushed = own; pushed != value; ++pushed) {
      const auto& given = dynamic_cast<const RowSparse&>(*pushed->encoding);
      RowSparse& found = rows_.emplace_back(given);
      const at::Tensor slots = slots_of(entry, given.ids, rule);
      set_ids(found, slots, entry.rows->size());
      pushed->encoding = &found;
    }
  }
}

bool Batch::has_rows_only() const {
  return torchkv::has_rows_only(values_);
}

at::Tensor Batch::find_distinct_rows() {
  const PlainDispatch plain;
  std::vector<int64_t> ids;
  for (const Value& value : values_) {
    const auto& given = dynamic_cast<const RowSparse&>(*value.encoding);
    bring_ids(given);
    const at::Tensor& own = given.ids;
    const auto* const begin = own.const_data_ptr<int64_t>();
    ids.insert(ids.end(), begin, begin + own.numel());
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  const auto count = static_cast<int64_t>(ids.size());
  const at::TensorOptions options =
      at::TensorOptions(c10::kCPU).dtype(c10::kLong);
  for (Value& value : values_) {
    const auto& given = dynamic_cast<const RowSparse&>(*value.encoding);
    RowSparse& found = rows_.emplace_back(given);
    found.ids_on_device.reset();
    found.merged.reset();
    found.ids = at::empty({given.ids.numel()}, options);
    auto* const places = found.ids.mutable_data_ptr<int64_t>();
    const auto* const own = given.ids.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < given.ids.numel(); ++i) {
      places[i] =
          std::lower_bound(ids.begin(), ids.end(), own[i]) - ids.begin();
    }
    if (!found.order.defined()) { // else they are sorted
      set_ids(found, found.ids, count);
    }
    value.encoding = &found;
  }
  const at::Tensor distinct = at::empty({count}, options);
  std::copy(ids.begin(), ids.end(), distinct.mutable_data_ptr<int64_t>());
  return distinct;
}

void Batch::keep_rows() {
  for (const Item& item : items) {
    if (item.entry->rows != nullptr) {
      std::vector<at::Tensor> slots;
      for (const Value& value : item.values) {
        slots.push_back(dynamic_cast<const RowSparse&>(*value.encoding).ids);
      }
      torchkv::keep_rows(*item.entry, slots);
    }
  }
}

void Batch::count_compressed(c10::ArrayRef<Item> summed) {
  for (const Item& item : summed) {
    auto sent = std::lower_bound(
        sent_.begin(),
        sent_.end(),
        item.values.end(),
        [](const PushedResidual& a, const Value* b) { return a.end < b; });
    bool is_compressed =
        dynamic_cast<const Compressed*>(item.values[0].encoding) != nullptr;
    for (; sent != sent_.end() && sent->end == item.values.end(); ++sent) {
      is_compressed = true;
      if (sent->residual.defined()) {
        item.entry->residuals[sent->position].tensor =
            std::move(sent->residual);
      }
    }
    item.entry->num_compressed += is_compressed ? 1 : 0;
  }
}

void Batch::plan(
    const Optimizer& optimizer,
    c10::function_ref<OptimizerPtr()> current,
    Slices& slices) {
  OptimizerPtr newer;
  steps.reserve(items.size()); // items point to them
  stepping.reserve(items.size());
  for (Item item : items) {
    Entry& entry = *item.entry;
    const Optimizer* own = &optimizer;
    if (entry.generation > optimizer.generation) {
      newer = newer == nullptr ? current() : newer;
      own = newer == nullptr ? own : newer.get();
    }
    if (entry.generation != own->generation) {
      slices.clear_state(entry);
      entry.generation = own->generation;
    }
    const GradientSpec& gradient = own->gradient;
    RuleStep& step = steps.emplace_back();
    own->set_step(step, entry.key, entry.step);
    step.scale = gradient.rescale_grad;
    step.clip_value = gradient.clip_value;
    step.is_lazy = gradient.lazy;
    item.step = &step;
    const bool steps_now = entry.num_accumulated + 1 >= gradient.accumulate;
    (steps_now ? stepping : accumulating).push_back(item);
  }
}

} // namespace torchkv

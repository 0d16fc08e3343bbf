#include "count_calls.h"

#include <algorithm>
#include <numeric>

namespace torchkv {
namespace {

int64_t bytes_of(c10::ArrayRef<at::Tensor> tensors) {
  return std::accumulate(
      tensors.begin(),
      tensors.end(),
      int64_t{0},
      [](int64_t sum, const auto& tensor) {
        return sum + static_cast<int64_t>(tensor.nbytes());
      });
}

int64_t bytes_added_up(const Item& item) {
  int64_t bytes = 0;
  for (const auto& value : item.values) {
    bytes += static_cast<int64_t>(value.data->nbytes());
  }
  return bytes;
}

// Divides the time by `weight` of each item, or evenly where all are 0.
template <class Weight>
void divide(
    c10::ArrayRef<Item> items,
    double KeyStats::* member,
    double seconds,
    Weight weight) {
  double total = 0;
  for (const auto& item : items) {
    total += static_cast<double>(weight(item));
  }
  for (const auto& item : items) {
    item.entry->stats.*member += total == 0
        ? seconds / static_cast<double>(items.size())
        : seconds * (static_cast<double>(weight(item)) / total);
  }
}

} // namespace

void add_seconds(
    c10::ArrayRef<Item> items,
    double KeyStats::* member,
    double seconds) {
  divide(items, member, seconds, &bytes_added_up);
}

void count_push(const Batch& batch, double KeyStats::* member, double seconds) {
  add_seconds(batch.items, member, seconds);
  for (size_t i = 0; i < batch.items.size(); ++i) {
    KeyStats& stats = batch.items[i].entry->stats;
    ++stats.pushes;
    stats.bytes_pushed += bytes_of(batch.pushed(i));
  }
}

void count_pull(c10::ArrayRef<Item> items, double seconds) {
  divide(items, &KeyStats::copy_seconds, seconds, [](const Item& item) {
    return bytes_of(item.outs);
  });
  for (const auto& item : items) {
    ++item.entry->stats.pulls;
    item.entry->stats.bytes_pulled += bytes_of(item.outs);
  }
}

void count_rows(Entry& entry, const at::Tensor& rows, double seconds) {
  ++entry.stats.pulls;
  entry.stats.bytes_pulled += static_cast<int64_t>(rows.nbytes());
  entry.stats.copy_seconds += seconds;
}

void count_call(const Call& call, const Entries& entries, bool are_usual) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    const std::lock_guard lock(entries[i]->mutex);
    KeyStats& stats = entries[i]->stats;
    const auto num_bytes = [&](const Tensors& tensors) {
      const auto of_key = tensors.of(number);
      return are_usual
          ? static_cast<int64_t>(of_key.size()) * entries[i]->meta.num_bytes()
          : bytes_of(of_key);
    };
    if (call.values != nullptr) {
      ++stats.pushes;
      stats.bytes_pushed += num_bytes(*call.values);
    }
    if (call.outs != nullptr) {
      ++stats.pulls;
      stats.bytes_pulled += num_bytes(*call.outs);
    }
  }
}

} // namespace torchkv

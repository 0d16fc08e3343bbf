// LocalStore's gradient compression, and the residuals that it saves.
#include <cstring>
#include <utility>

#include "check.h"
#include "compressed_values.h"
#include "local_store.h"

namespace torchkv {

CompressionPtr LocalStore::compression() const {
  if (!compresses_) {
    return nullptr;
  }
  const std::lock_guard lock(updater_mutex_);
  return compression_;
}

void LocalStore::set_compression(const Compression& compression) {
  constexpr auto* op = "set_gradient_compression";
  check_compression(op, compression);
  TORCH_CHECK_VALUE(
      !only_cpu_ || compression.is_none(),
      op,
      ": expected a store of type 'device' or 'nccl', but got 'local', where "
      "no values are sent between devices");
  std::vector<Key> unknown;
  for (const auto& [key, group] : compression.keys) {
    unknown.push_back(key);
  }
  std::vector<EntryPtr> entries = table_.entries(op);
  if (!entries.empty()) {
    check_known(op, table_, unknown);
    unknown.clear();
  }
  CompressionPtr next;
  if (!compression.is_none()) {
    next = std::make_shared<const Compression>(compression);
  }
  {
    const std::lock_guard lock(updater_mutex_);
    table_.check_open(op);
    compression_ = next;
    compresses_ = next != nullptr;
    unknown.insert(
        unknown.begin(), expected_keys_.begin(), expected_keys_.end());
    set_expected_keys(std::move(unknown));
  }
  // As in replace_updater.
  for (const auto& entry : entries) {
    const std::unique_lock lock(entry->mutex, std::try_to_lock);
    if (lock.owns_lock() &&
        (next == nullptr || !next->codec_of(entry->key).has_feedback())) {
      entry->residuals.clear();
    }
  }
}

void LocalStore::save_residuals(const Entry& entry, StoreState& state) const {
  if (!state.compression) {
    return;
  }
  state.num_compressed.push_back(entry.num_compressed);
  auto& result = state.residuals.emplace_back();
  for (const auto& residual : entry.residuals) {
    const at::Tensor& copy = result.emplace_back(
        slices_.empty_like(entry, residual_dtype(entry.meta), c10::kCPU));
    if (residual.defined()) {
      slices_.copy(copy, residual);
    } else {
      std::memset(copy.mutable_data_ptr(), 0, copy.nbytes());
    }
  }
}

void LocalStore::load_compression(const StoreState& state, const Keys& keys) {
  constexpr auto* op = "load";
  if (!state.compression) {
    return;
  }
  for (size_t i = 0; i < keys.list.size(); ++i) {
    Entry& entry = *table_.find(op, keys.list[i])[0];
    check_residuals(op, entry, state.residuals[i]);
    check_counter({op, entry.key}, "num_compressed", state.num_compressed[i]);
    for (const auto& residual : state.residuals[i]) {
      const at::Tensor& copy = entry.residuals.emplace_back(
          slices_.empty_like(entry, residual.scalar_type(), c10::kCPU));
      slices_.copy(copy, residual);
    }
    entry.num_compressed = state.num_compressed[i];
  }
  set_compression(*state.compression);
}

} // namespace torchkv

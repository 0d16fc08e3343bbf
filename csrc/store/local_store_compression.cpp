// LocalStore's gradient compression, and the residuals that it saves.
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
  replace_compression(
      op, compression, check_or_expect(op, table_, compression.named_keys()));
}

void LocalStore::replace_compression(
    const char* op,
    const Compression& compression,
    std::vector<Key> expected) {
  CompressionPtr next;
  uint64_t later = 0; // later compressions have greater generations
  std::vector<EntryPtr> entries;
  {
    const std::lock_guard lock(updater_mutex_);
    entries = table_.entries(op);
    if (!compression.is_none()) {
      next = std::make_shared<const StoreCompression>(
          compression, compression_.get());
    }
    later = new_generation();
    compression_ = next;
    compresses_ = next != nullptr;
    compression_keys_ = std::move(expected);
    expects_keys_ = !expected_keys_.empty() || !compression_keys_.empty();
  }
  free_residuals(entries, next.get(), later);
}

void LocalStore::save_residuals(Entry& entry, StoreState& state) const {
  if (!state.compression) {
    return;
  }
  state.num_compressed.push_back(entry.num_compressed);
  auto& result = state.residuals.emplace_back();
  for (auto& residual : entry.residuals) {
    result.push_back(residual_on_cpu(entry, residual, slices_));
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
    if (state.num_compressed[i] == 0) {
      continue; // zeros
    }
    for (const auto& residual : state.residuals[i]) {
      const at::Tensor copy =
          slices_.empty_like(entry, residual.scalar_type(), c10::kCPU);
      slices_.copy(copy, residual);
      entry.residuals.push_back({copy, {}});
    }
    entry.num_compressed = state.num_compressed[i];
  }
  TORCH_CHECK_VALUE(
      !only_cpu_ || state.compression->is_none(),
      op,
      ": expected a store of type 'device' or 'nccl', as the saved one "
      "compresses, but got 'local'");
  check_compression(op, *state.compression);
  // A key that was deleted may be in a group.
  replace_compression(op, *state.compression, {});
  if (const CompressionPtr loaded = this->compression()) {
    for (const auto& key : keys.list) {
      table_.find(op, key)[0]->residual_generation = loaded->generation();
    }
  }
}

} // namespace torchkv

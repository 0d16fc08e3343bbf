// DistStore's gradient compression: of what this rank sends.
#include <c10/util/Exception.h>

#include <utility>

#include "../store/check.h"
#include "../store/compressed_values.h"
#include "dist_store.h"
#include "pack_value.h"

namespace torchkv::dist {
CompressionPtr DistStore::compression() const {
  const std::lock_guard lock(updater_mutex_);
  return compression_;
}

void DistStore::set_compression(const Compression& compression) {
  constexpr auto* op = "set_gradient_compression";
  check_compression(op, compression);
  table_.check_open(op);
  std::vector<Key> keys;
  for (const auto& [key, group] : compression.keys) {
    keys.push_back(key);
  }
  if (table_.summary().num_keys != 0) {
    check_known(op, table_, keys);
    keys.clear();
  }
  CompressionPtr next;
  uint64_t later = 0;
  {
    const std::lock_guard lock(updater_mutex_);
    const auto* optimizer = std::get_if<OptimizerPtr>(&updater_);
    if (!compression.is_none()) {
      check_skips(
          op, optimizer != nullptr ? (*optimizer)->gradient : GradientSpec());
      next = std::make_shared<const StoreCompression>(
          compression, compression_.get());
    }
    later = new_generation();
    compression_ = next;
    compression_keys_ = std::move(keys);
  }
  free_residuals(table_.entries(op), next.get(), later);
}

// The ranks do not take back what they have sent of a push that is skipped.
void DistStore::check_skips(const char* op, const GradientSpec& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !gradient.skip_nonfinite,
      op,
      ": expected skip_nonfinite or gradient compression, but got both, which "
      "stores on several machines do not combine");
}

// Of a call whose values are compressed; null: they are not.
CompressionPtr DistStore::compression_of(
    const Call& call,
    const Entries& entries) const {
  CompressionPtr result = compression();
  if (result != nullptr) {
    check_compressible(call, entries, result->get(), runtime_);
  }
  return result;
}

// What this rank has not sent, with zeros where it has not pushed yet.
UnsentByKey DistStore::unsent(const Keys& keys) const {
  UnsentByKey result;
  const CompressionPtr compression = this->compression();
  if (compression == nullptr || keys.list.empty()) {
    return result;
  }
  for (const auto& entry : table_.find("save", keys)) {
    const bool has_residual = c10::isFloatingType(entry->meta.dtype) &&
        compression->get().codec_of(entry->key).has_feedback();
    const std::lock_guard lock(entry->mutex);
    Unsent& kept = result[entry->key];
    kept.num_compressed = entry->num_compressed;
    if (has_residual) {
      renew_residuals(*entry, *compression);
      kept.residual = residual_of(*entry).clone();
    }
  }
  return result;
}

void DistStore::add_unsent(OwnState& own, const Keys& keys) const {
  own.state.residuals.resize(own.state.values.size());
  own.state.num_compressed.resize(own.state.values.size());
  for (auto& [key, kept] : unsent(keys)) {
    own.residuals.emplace_back(
        key, kept.num_compressed, std::move(kept.residual));
  }
}

// In keys that have just been made; check_loads has checked the number.
void DistStore::load_compression(const StoreState& state, const Keys& keys) {
  if (!state.compression || state.compression->is_none()) {
    return;
  }
  const auto own = static_cast<size_t>(rank());
  const auto compression =
      std::make_shared<const StoreCompression>(*state.compression, nullptr);
  for (size_t i = 0; i < keys.list.size(); ++i) {
    const EntryPtr entry = table_.find("load", keys.list[i])[0];
    const std::lock_guard lock(entry->mutex);
    entry->num_compressed = state.num_compressed[i];
    entry->residual_generation = compression->generation();
    if (entry->num_compressed != 0 && own < state.residuals[i].size()) {
      entry->residuals.push_back(
          {state.residuals[i][own].clone(at::MemoryFormat::Contiguous), {}});
    }
  }
  const std::lock_guard lock(updater_mutex_);
  compression_ = compression;
}

} // namespace torchkv::dist

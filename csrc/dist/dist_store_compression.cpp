// DistStore's gradient compression: of what this rank sends.
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "../store/check.h"
#include "../store/compressed_values.h"
#include "dist_store.h"

namespace torchkv::dist {

CompressionPtr DistStore::compression() const {
  const std::lock_guard lock(updater_mutex_);
  return compression_;
}

void DistStore::set_compression(const Compression& compression) {
  constexpr auto* op = "set_gradient_compression";
  check_compression(op, compression);
  std::vector<Key> keys = check_or_expect(op, table_, compression.named_keys());
  const auto setting = hold(op, setting_mutex_); // the updater stays
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

// Of a call whose values are compressed; null: they are not, also because the
// call is going to be refused, so that what is not sent stays.
CompressionPtr DistStore::compression_of(
    const Call& call,
    const Entries& entries) const {
  CompressionPtr result = compression();
  if (result == nullptr) {
    return nullptr;
  }
  check_compressible(call, entries, result->get(), runtime_);
  join(call.op);
  const auto lost = session_->lost_ranks();
  const auto is_lost = [&](const Place& place) {
    return std::count(lost.begin(), lost.end(), place.server) != 0;
  };
  const bool is_refused = !lost.empty() &&
      std::any_of(entries.begin(), entries.end(), [&](const auto& entry) {
        const auto places = places_of(*entry);
        return std::any_of(places.begin(), places.end(), is_lost);
      });
  return is_refused ? nullptr : result;
}

// What this rank has not sent of keys that it has pushed.
UnsentByKey DistStore::unsent(const Keys& keys) const {
  UnsentByKey result;
  const CompressionPtr compression = this->compression();
  if (compression == nullptr || keys.list.empty()) {
    return result;
  }
  const PlainDispatch plain;
  for (const auto& entry : table_.find("save", keys)) {
    const std::lock_guard lock(entry->mutex);
    renew_residuals(*entry, *compression);
    Unsent& kept = result[entry->key];
    kept.num_compressed = entry->num_compressed;
    if (!entry->residuals.empty()) {
      kept.residual = entry->residuals[0].tensor.clone();
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

// REQUIRES: at most a residual for each rank.
void DistStore::restore_compression(const StoreState& state) {
  CompressionPtr compression;
  if (state.compression && !state.compression->is_none()) {
    compression =
        std::make_shared<const StoreCompression>(*state.compression, nullptr);
  }
  const auto own = static_cast<size_t>(rank());
  for (size_t i = 0; i < state.values.size(); ++i) {
    const Key key = state.int_keys.empty() ? Key(state.str_keys[i])
                                           : Key(state.int_keys[i]);
    const EntryPtr entry = table_.find("load", key)[0];
    const std::lock_guard lock(entry->mutex);
    entry->residuals.clear();
    entry->num_compressed = 0;
    if (compression == nullptr) {
      continue;
    }
    entry->num_compressed = state.num_compressed[i];
    entry->residual_generation = compression->generation();
    if (entry->num_compressed != 0 && own < state.residuals[i].size()) {
      const at::Tensor copy =
          Buffers().empty(entry->meta.sizes, residual_dtype(entry->meta));
      runtime_.copy(copy, state.residuals[i][own]);
      entry->residuals.push_back({copy, {}});
    }
  }
  const std::lock_guard lock(updater_mutex_);
  compression_ = compression;
  compression_keys_.clear();
}

} // namespace torchkv::dist

// DistStore's gradient compression: of what this rank sends.
#include <c10/util/Exception.h>

#include <utility>

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
  table_.check_open(op);
  std::vector<Key> keys;
  for (const auto& [key, group] : compression.keys) {
    keys.push_back(key);
  }
  if (table_.summary().num_keys != 0) {
    check_known(op, table_, keys);
    keys.clear();
  }
  const std::lock_guard lock(updater_mutex_);
  const auto* optimizer = std::get_if<OptimizerPtr>(&updater_);
  CompressionPtr next;
  if (!compression.is_none()) {
    check_skips(
        op, optimizer != nullptr ? (*optimizer)->gradient : GradientSpec());
    next = std::make_shared<const StoreCompression>(
        compression, compression_.get());
  }
  compression_ = std::move(next);
  compression_keys_ = std::move(keys);
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

} // namespace torchkv::dist

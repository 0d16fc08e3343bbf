// How the values of a LocalStore are replaced, and shared with the caller.
#include <optional>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../memory/layout.h"
#include "check.h"
#include "compressed_values.h"
#include "local_store.h"
#include "row_values.h"
#include "shared_values.h"

namespace torchkv {
namespace {

// Whether a value, whole as that of `next`, is where that one is, so that what
// an optimizer keeps for it may stay. REQUIRES: the entry's mutex.
bool keeps_place(const Entry& entry, const Entry& next) {
  return entry.slices.size() == 1 &&
      entry.slices[0].home == next.slices[0].home &&
      same_layout(entry.meta.sizes, entry.strides, next.strides);
}

} // namespace

void LocalStore::assign(const Call& call) {
  assign(call, updater());
}

void LocalStore::assign(const Call& given, const Updater& updater) {
  const Entries entries = table_.find(given.op, given.keys);
  check_one_each(given, /*takes_rows=*/true, /*takes_encoded=*/true);
  for (size_t i = 0; i < entries.size(); ++i) {
    const Where where{given.op, entries[i]->key};
    const bool is_row_sparse = entries[i]->rows != nullptr;
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        is_row_sparse || !is_sparse_coo(given.values->flat[i]),
        where,
        "expected a dense tensor, as the key is dense, but got a sparse one");
    TORCHKV_CHECK_VALUE(
        !is_row_sparse || !given.options.share,
        where,
        "expected a dense key to share its value, but got a row-sparse one");
  }
  const std::optional<Tensors> rows =
      with_rows(given, entries, streams_.runtime);
  Call call = given;
  call.values = rows ? &*rows : given.values;
  check(call, entries, {});
  check_no_repeats(call.op, entries);
  if (call.options.share) {
    share(call, entries);
    return;
  }
  struct Assigned {
    at::Tensor value;
    bool keep_master;
    int64_t version;
  };
  // All allocations first: running out of memory changes nothing.
  std::vector<Assigned> assigned;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    if (entry.rows != nullptr) {
      assigned.emplace_back();
      continue;
    }
    slices_.end_leases(entry);
    const at::Tensor value = slices_.laid_out_as(entry, call.values->flat[i]);
    assigned.push_back(
        {value, slices_.master_rounds_to(entry, value), entry.version});
  }
  const Groups values(entries, *call.values);
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const auto& [value, keep_master, version] = assigned[i];
    const std::lock_guard lock(entry.mutex);
    if (entry.rows != nullptr) {
      replace_rows(values, i, updater);
    } else {
      slices_.end_leases(entry);
      // A push of another thread in between has stepped the master.
      slices_.assign(entry, value, keep_master && entry.version == version);
    }
    ++entry.version;
  }
}

void LocalStore::share(const Call& call, const Entries& entries) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const at::Tensor& value = call.values->flat[i];
    const Where where{call.op, entries[i]->key};
    TORCHKV_CHECK_TYPE(
        value.scalar_type() == entries[i]->meta.dtype,
        where,
        "expected a tensor of dtype ",
        entries[i]->meta.dtype,
        " to share, but got ",
        value.scalar_type());
  }
  check_shareable(call, table_.entries(call.op), only_cpu_);
  has_shared_ = true;
  const OptimizerPtr optimizer = current_optimizer();
  // All copies first: running out of memory changes nothing.
  Entries shared;
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    Entry& next =
        *shared.emplace_back(c10::make_intrusive<Entry>(entry.key, entry.meta));
    placement_.store(next, call.values->flat[i], /*share=*/true);
    const std::lock_guard lock(entry.mutex);
    for (auto& residual : entry.residuals) {
      next.residuals.push_back(
          {slices_.laid_out_as(next, residual_on_cpu(entry, residual, slices_)),
           {}});
    }
    if (optimizer != nullptr && entry.generation == optimizer->generation &&
        !keeps_place(entry, next)) {
      const RuleSpec rule = optimizer->rule_of(entry.key);
      slices_.set_state(next, rule, slices_.state_of(entry, rule));
    }
  }
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    Entry& next = *shared[i];
    const std::lock_guard lock(entry.mutex);
    if (entry.is_shared &&
        entry.slices[0].value.const_data_ptr() ==
            next.slices[0].value.const_data_ptr() &&
        keeps_place(entry, next)) {
      continue; // this very tensor
    }
    if (keeps_place(entry, next)) {
      // Where the master does not round to the value, the next step replaces
      // it.
      entry.slices[0].value = next.slices[0].value;
      entry.slices[0].is_leased = false;
    } else {
      entry.residuals = std::move(next.residuals);
      entry.slices = std::move(next.slices);
      entry.strides = next.strides;
      entry.device = next.device;
      entry.placing = next.placing;
    }
    entry.is_shared = true;
    ++entry.version;
  }
}

} // namespace torchkv

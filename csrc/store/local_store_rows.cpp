// Rows of the values of a LocalStore.
#include <mutex>

#include "check.h"
#include "count_calls.h"
#include "local_store.h"
#include "shared_values.h"

namespace torchkv {

void LocalStore::pull_rows(const char* op, c10::ArrayRef<RowPull> pulls) {
  Keys keys;
  Tensors outs;
  for (const auto& pull : pulls) {
    keys.list.push_back(pull.key);
    if (pull.out.defined()) {
      outs.append(pull.out);
    }
    outs.end_group();
  }
  const Entries entries = table_.find(op, keys);
  for (size_t i = 0; i < pulls.size(); ++i) {
    const Meta& meta = entries[i]->meta;
    check_still_fits(op, pulls[i], meta.sizes, meta.dtype);
  }
  if (has_shared_) {
    check_shared({op, keys, nullptr, &outs}, entries);
  }
  for (size_t i = 0; i < pulls.size(); ++i) {
    Entry& entry = *entries[i];
    const std::lock_guard lock(entry.mutex);
    const Stopwatch watch;
    const bool in_place = entry.slices.size() == 1 &&
        entry.slices[0].home.device.is_cpu() && pulls[i].rows.is_cpu();
    copy_rows(
        in_place ? entry.slices[0].value
                 : slices_.copy_of(entry, pulls[i].rows.device()),
        pulls[i]);
    count_rows(entry, pulls[i].rows, watch.seconds());
  }
}

} // namespace torchkv

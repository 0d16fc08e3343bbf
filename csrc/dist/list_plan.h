#pragma once

#include <c10/util/FunctionRef.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../core/export.h"
#include "../memory/entry.h"
#include "../store/arguments.h"
#include "protocol/slice_list.h"

namespace torchkv::dist {

// Which of a call's values are small, and travel together: one operation costs
// more than the bytes of such a value. The same for all calls on these keys.
struct ListPlan {
  // Of one server and dtype.
  struct List {
    SliceListPtr slices;
    std::vector<size_t> numbers; // of the call's keys
    std::vector<Meta> metas;
    c10::ScalarType dtype;

    int64_t num_bytes() const {
      return slices->num_elements() *
          static_cast<int64_t>(c10::elementSize(dtype));
    }
  };
  std::vector<List> lists; // in the order of their first keys
  std::vector<size_t> rest; // the numbers of the other keys, ascending
};
using ListPlanPtr = std::shared_ptr<const ListPlan>;

// The plans of recent calls. Thread-safe.
class TORCHKV_API ListPlans {
 public:
  // None if the key is split.
  using ServerOf =
      c10::function_ref<std::optional<int32_t>(const Entry& entry)>;
  // Null if no values of the call travel together.
  ListPlanPtr of(const Entries& entries, ServerOf server_of);
  // Frees all plans, which keep the memory of their entries: residuals, too.
  void clear();

 private:
  struct Known {
    Entries entries;
    ListPlanPtr plan;
  };
  std::mutex mutex_; // guards the rest
  std::vector<Known> known_; // the latest first
};

} // namespace torchkv::dist

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <deque>
#include <memory>
#include <vector>

#include "../core/rule.h"
#include "../core/value.h"
#include "../device/runtime.h"
#include "entry.h"

namespace torchkv {

// What one call does to one key: the values to sum, or the tensors to fill.
// Owns neither and is valid during the call. REQUIRES: the entry's mutex.
struct Item {
  Entry* entry = nullptr;
  c10::ArrayRef<Value> values;
  c10::ArrayRef<at::Tensor> outs;
  const RuleStep* step = nullptr; // null = ASSIGN
};

// What a call does to one slice: the slice's share of an item.
struct Part {
  Entry* entry = nullptr;
  Slice* slice = nullptr;
  c10::ArrayRef<Value> values; // of the slice's shape, as the outs are
  c10::ArrayRef<at::Tensor> outs;
  const RuleStep* step = nullptr;
};

// An out of a sharded value that cannot be filled shard by shard.
struct WholeOut {
  Entry* entry = nullptr;
  const at::Tensor* out = nullptr;
};

// The parts of a call's items. Those of a sharded value are views of the call's
// tensors. A value whose memory layout differs from the stored one's is copied
// first, ordered with the current stream of its device; an out of another
// layout or dtype has no parts. Encoded values are passed through unchanged.
// REQUIRES: outlives the StreamOrder of the call.
class Parts {
 public:
  Parts(Runtime& runtime, c10::ArrayRef<Item> items);
  Parts(const Parts&) = delete; // parts point into it
  Parts& operator=(const Parts&) = delete;

  auto begin() {
    return list_.begin();
  }
  auto end() {
    return list_.end();
  }
  // Calls `visit(begin, end)` with the parts of each item.
  template <class Visit>
  void for_each_item(Visit visit) {
    for (auto* part = begin(); part != end();) {
      auto* const first = part;
      while (part != end() && part->entry == first->entry) {
        ++part;
      }
      visit(first, part);
    }
  }
  size_t size() const {
    return list_.size();
  }
  c10::ArrayRef<WholeOut> whole_outs() const {
    return whole_outs_;
  }

  // Replace a part's values by one tensor, and its outs.
  const at::Tensor& set_value(Part& part, at::Tensor value);
  void set_outs(Part& part, c10::SmallVector<at::Tensor, 4> outs);

 private:
  void add_sharded(Runtime& runtime, const Item& item);

  // Owns what parts point to, except the call's tensors.
  struct Storage {
    std::deque<at::Tensor> tensors;
    std::deque<c10::SmallVector<Value, 4>> values;
    std::deque<c10::SmallVector<at::Tensor, 4>> outs;
  };
  Storage& storage();

  c10::SmallVector<Part, 1> list_;
  std::vector<WholeOut> whole_outs_;
  std::unique_ptr<Storage> storage_; // null where not needed
};

} // namespace torchkv

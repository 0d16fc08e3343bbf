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
#include "item.h"

namespace torchkv {

// What a call does to one slice: the slice's share of an item.
struct Part {
  Entry* entry = nullptr;
  Slice* slice = nullptr;
  c10::ArrayRef<Value> values; // of the slice's shape, as the outs are
  c10::ArrayRef<at::Tensor> outs;
  const RuleStep* step = nullptr;
};

// An out of a value that is cut, which must be filled as a whole.
struct WholeOut {
  Entry* entry = nullptr;
  const at::Tensor* out = nullptr;
};

// The parts of a call's items. Of a value that is cut, they are views of the
// call's tensors. A value of another memory layout than the stored one is
// copied first, ordered with the current stream of its device; such an out, or
// one of another dtype, has no parts.
// REQUIRES: outlives the StreamOrder of the call.
class Parts {
 public:
  Parts(Runtime& runtime, c10::ArrayRef<Item> items);
  Parts(const Parts&) = delete; // parts point into it
  Parts& operator=(const Parts&) = delete;
  Parts(Parts&&) = delete;
  Parts& operator=(Parts&&) = delete;
  ~Parts() = default;

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

 private:
  void add_cut(Runtime& runtime, const Item& item);

  // What the parts of cut values point to.
  struct Views {
    std::deque<at::Tensor> tensors;
    std::deque<c10::SmallVector<Value, 4>> values;
    std::deque<c10::SmallVector<at::Tensor, 4>> outs;
  };

  c10::SmallVector<Part, 1> list_;
  std::vector<WholeOut> whole_outs_;
  std::unique_ptr<Views> views_; // null where no value is cut
};

} // namespace torchkv

#pragma once

#include <deque>
#include <vector>

#include "../core/export.h"
#include "../device/runtime.h"
#include "comm.h"
#include "comm_aten.h"

namespace torchkv {

// CommAten, with NCCL as carrier between CUDA devices. A value that is cut is
// summed by ncclReduceScatter and handed out by ncclAllGather; one that is not,
// or whose pieces differ in size, by ncclReduce to each home and ncclBroadcast
// from there. One group of operations for all keys of a call. What NCCL does
// not take goes as CommAten sends it: tensors of the CPU, other layouts, dtypes
// that it cannot add, values that lie on the home device already.
//
// NCCL adds in the order of its rings, and 16-bit numbers are rounded at every
// hop: the bits of a sum may depend on the number of devices and on NCCL's
// choice. With several values on one device, or none at home, a key goes as
// CommAten sends it.
class TORCHKV_API CommNccl final : public Comm {
 public:
  // RuntimeError where no NCCL is loaded.
  explicit CommNccl(Runtime& runtime);

  void store(Entry& entry, const at::Tensor& value) override {
    local_.store(entry, value);
  }
  void adopt(Entry& entry) override {
    local_.adopt(entry);
  }
  void place(c10::ArrayRef<Item> items, bool may_cut) override {
    local_.place(items, may_cut);
  }
  void reduce_update(c10::ArrayRef<Item> items) override;
  void accumulate(c10::ArrayRef<Item> items) override;
  double squared_norm(c10::ArrayRef<Item> items, double scale) override;
  KeyState state_of(Entry& entry, const RuleSpec& rule) override {
    return local_.state_of(entry, rule);
  }
  void set_state(Entry& entry, const RuleSpec& rule, const KeyState& state)
      override {
    local_.set_state(entry, rule, state);
  }
  void clear_state(Entry& entry) override {
    local_.clear_state(entry);
  }
  void reduce(const Item& item, Update update) override;
  void copy_out(c10::ArrayRef<Item> items) override;
  at::Tensor empty_like(const Entry& entry) override {
    return local_.empty_like(entry);
  }

 private:
  struct Brought;
  Brought bring_home(Parts& parts);
  std::deque<std::vector<at::Tensor>> send_out(Parts& parts);

  Runtime& runtime_;
  CommAten local_;
};

} // namespace torchkv

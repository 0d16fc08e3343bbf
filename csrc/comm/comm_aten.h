#pragma once

#include <string>
#include <vector>

#include "../core/export.h"
#include "../device/runtime.h"
#include "../device/stream_order.h"
#include "../memory/parts.h"
#include "../memory/places.h"
#include "../memory/slices.h"
#include "comm.h"

namespace torchkv {

// Sums and copies for tensors of any device: the kernels of kernels/cpu where
// all is on the CPU, those of kernels/cuda where a slice lives on a CUDA
// device, and ATen operators elsewhere and for what those do not know.
//
// Sums run left to right in the accumulation type (at::toOpMathType of the
// promotion of all values and the stored value; fp8 counts as fp32) and are
// rounded once, so the same values give the same bits on every run, wherever a
// value is cut; only a norm may differ by where. On an accelerator, a step of
// an optimizer that runs out of memory may be half done.
class TORCHKV_API CommAten final : public Comm {
 public:
  // `places` as the text of TORCHKV_PLACES.
  CommAten(
      Slices::Policy policy,
      Runtime& runtime,
      const std::string& places = "")
      : runtime_(runtime),
        places_(runtime, places),
        slices_(policy, runtime, events_, places_) {}

  void store(Entry& entry, const at::Tensor& value) override {
    slices_.store(entry, value);
  }
  void adopt(Entry& entry) override {
    slices_.adopt(entry);
  }
  void place(c10::ArrayRef<Item> items, bool may_cut) override {
    slices_.place(items, may_cut);
  }
  void reduce_update(c10::ArrayRef<Item> items) override;
  void accumulate(c10::ArrayRef<Item> items) override;
  double squared_norm(c10::ArrayRef<Item> items, double scale) override;
  KeyState state_of(Entry& entry, const RuleSpec& rule) override {
    return slices_.state_of(entry, rule);
  }
  void set_state(Entry& entry, const RuleSpec& rule, const KeyState& state)
      override {
    slices_.set_state(entry, rule, state);
  }
  void clear_state(Entry& entry) override {
    slices_.clear_state(entry);
  }
  void reduce(const Item& item, Update update) override;
  void copy_out(c10::ArrayRef<Item> items) override;
  at::Tensor empty_like(const Entry& entry) override {
    return slices_.empty_like(entry, entry.meta.dtype, entry.device);
  }

  // The same for parts, whose values another Comm may have brought home.
  void reduce_update(Parts& parts);
  void accumulate(Parts& parts);
  double squared_norm(Parts& parts, double scale);
  void copy_out(Parts& parts);

  // Makes one slice of all where an update needs the whole value.
  void gather_for(c10::ArrayRef<Item> items);
  Slices& slices() {
    return slices_;
  }
  // For a call's work on the entries' slices.
  StreamOrder make_order() {
    return {runtime_, events_, places_};
  }

 private:
  struct Ready;
  struct Work;
  Ready ready(const Part& part, StreamOrder& order);
  std::vector<Ready> prepare(Parts& parts, StreamOrder& order);
  at::Tensor sum_of(
      c10::ArrayRef<Value> values,
      const Slice& slice,
      c10::ScalarType dtype,
      StreamOrder& order);
  void reduce_into(
      c10::ArrayRef<Value> values,
      const at::Tensor& result,
      const Place& home,
      Work& work);
  void step_into(
      const Part& part,
      const Ready& ready,
      Work& work,
      StreamOrder& order);

  Runtime& runtime_;
  EventPool events_{runtime_};
  Places places_;
  Slices slices_;
};

} // namespace torchkv

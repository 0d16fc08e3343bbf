#pragma once

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "../export.h"
#include "../runtime.h"
#include "comm.h"
#include "peer_access.h"
#include "stream_order.h"

namespace torchkv {

// Sums and copies for tensors of any device: the kernels of kernels/cpu where
// all is on the CPU, those of kernels/cuda where the value lives on a CUDA
// device, and ATen operators elsewhere and for what those do not know. A value
// has one slice.
//
// Sums run left to right in the accumulation type (at::toOpMathType of the
// promotion of all values and the stored value; fp8 counts as fp32) and are
// rounded once, so the same values give the same bits on every run. On an
// accelerator, a step of an optimizer that runs out of memory may be half done.
class TORCHKV_API CommAten final : public Comm {
 public:
  // Where a value lives: in CPU memory, or on the device of its first value or,
  // if that is the CPU, on one of the accelerators of the first call that
  // brings any: the one with the fewest bytes of values so far, largest values
  // first.
  enum class Home : uint8_t { kCpu, kDevice };

  CommAten(Home home, Runtime& runtime) : home_(home), runtime_(runtime) {}

  void store(Entry& entry, const at::Tensor& value) override;
  void place(c10::ArrayRef<Item> items) override;
  void reduce_update(c10::ArrayRef<Item> items) override;
  void accumulate(c10::ArrayRef<Item> items) override;
  double squared_norm(c10::ArrayRef<Item> items) override;
  KeyState state_of(Entry& entry, const RuleSpec& rule) override;
  void set_state(Entry& entry, const RuleSpec& rule, const KeyState& state)
      override;
  void clear_state(Entry& entry) override;
  void reduce(const Item& item, Update update) override;
  void copy_out(c10::ArrayRef<Item> items) override;
  at::Tensor empty_like(const Entry& entry) override;

  // The slice's, made where there is none. REQUIRES: a StreamOrder has entered
  // the slice.
  at::Tensor& merge_buffer(Slice& slice);

 private:
  struct DeviceOrder {
    bool operator()(c10::Device a, c10::Device b) const {
      return std::pair(a.type(), a.index()) < std::pair(b.type(), b.index());
    }
  };

  // Uninitialised memory for a tensor like `model`; of a fixed size if it is
  // `for_the_store`.
  at::Tensor allocate(
      const at::Tensor& model,
      c10::Device device,
      bool for_the_store);
  Slice make_slice(const at::Tensor& value, c10::Device home);
  Slice moved(const Slice& slice, c10::Device home);
  void copy(const at::Tensor& value, const at::Tensor& result);

  // Uninitialised memory in the places of a slice's elements.
  at::Tensor allocate_state(const Slice& slice, c10::ScalarType dtype);
  // Makes what the rule needs and is not there, and adds it to `made`; returns
  // whether all states were there.
  bool prepare_state(
      Slice& slice,
      const RuleSpec& rule,
      std::vector<at::Tensor*>& made);
  struct Ready;
  struct Work;
  Ready ready(const Item& item, StreamOrder& order);
  std::vector<Ready> prepare(c10::ArrayRef<Item> items, StreamOrder& order);
  at::Tensor sum_of(
      c10::ArrayRef<Value> values,
      const Slice& slice,
      c10::ScalarType dtype,
      StreamOrder& order);
  void reduce_into(
      c10::ArrayRef<Value> values,
      const at::Tensor& result,
      Work& work);
  static c10::SmallVector<Value, 8> gradients_of(const Item& item);
  void step_into(
      const Item& item,
      const Ready& ready,
      Work& work,
      StreamOrder& order);

  const Home home_;
  Runtime& runtime_;
  EventPool events_{runtime_};
  PeerAccess peers_{runtime_};
  std::mutex loads_mutex_; // guards loads_
  std::map<c10::Device, int64_t, DeviceOrder> loads_; // bytes of values
};

} // namespace torchkv

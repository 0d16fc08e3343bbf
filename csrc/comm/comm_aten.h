#pragma once

#include "../export.h"
#include "../runtime.h"
#include "comm.h"

namespace torchkv {

// Sums and copies for tensors of any device: the CPU kernels of kernels/cpu
// where all is on the CPU, ATen operators elsewhere. A value has one slice.
//
// Sums run left to right in the accumulation type (at::toOpMathType of the
// promotion of all values and the stored value; fp8 counts as fp32) and are
// rounded once, so the same values give the same bits on every run.
class TORCHKV_API CommAten final : public Comm {
 public:
  // Where a value lives: in CPU memory, or on the first accelerator that the
  // first call with the key names (on the CPU while there is none).
  enum class Home : uint8_t { kCpu, kDevice };

  CommAten(Home home, Runtime& runtime) : home_(home), runtime_(runtime) {}

  void store(Entry& entry, const at::Tensor& value) override;
  void place(Entry& entry, c10::ArrayRef<Place> places) override;
  void reduce_update(
      c10::ArrayRef<Item> items,
      const RuleSpec& rule,
      c10::ArrayRef<KeyArgs> args) override;
  void reduce(const Item& item, Update update) override;
  void copy_out(c10::ArrayRef<Item> items) override;

 private:
  void copy(const at::Tensor& value, const at::Tensor& result);
  void sum(c10::ArrayRef<Value> values, const at::Tensor& result);

  const Home home_;
  Runtime& runtime_;
};

} // namespace torchkv

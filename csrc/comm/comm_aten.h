#pragma once

#include "../export.h"
#include "../kernels/cpu/sum.h"
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
  // Where a value lives: in CPU memory, or on the device of its first value or,
  // if that is the CPU, on the first accelerator that a call brings.
  enum class Home : uint8_t { kCpu, kDevice };

  CommAten(Home home, Runtime& runtime) : home_(home), runtime_(runtime) {}

  void store(Entry& entry, const at::Tensor& value) override;
  void place(Entry& entry, at::TensorList tensors) override;
  void reduce_update(c10::ArrayRef<Item> items, const RuleSpec& rule) override;
  void reduce(const Item& item, Update update) override;
  void copy_out(c10::ArrayRef<Item> items) override;
  at::Tensor empty_like(const Entry& entry) override;

 private:
  // Uninitialised memory for a tensor like `model`; of a fixed size if it is
  // `for_the_store`.
  at::Tensor allocate(
      const at::Tensor& model,
      c10::Device device,
      bool for_the_store);
  Slice make_slice(const at::Tensor& value, c10::Device home);
  void copy(const at::Tensor& value, const at::Tensor& result);
  void reduce_apart(
      c10::ArrayRef<Value> values,
      const at::Tensor& stored,
      c10::ScalarType accumulation,
      const RuleSpec& rule);
  void reduce_into(
      c10::ArrayRef<Value> values,
      const at::Tensor& result,
      const RuleSpec& rule,
      kernels::cpu::SumBatch& batch);

  const Home home_;
  Runtime& runtime_;
};

} // namespace torchkv

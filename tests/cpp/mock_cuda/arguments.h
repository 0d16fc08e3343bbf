#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/FunctionRef.h>

#include <optional>

// The tensors among the boxed arguments of an operator.
namespace torchkv::mock_cuda {

// Whether the operator writes that argument: `Tensor(a!)`.
inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Replaces each defined tensor in a value, also in lists, by `change` of it.
c10::IValue with_tensors(
    const c10::IValue& value,
    c10::function_ref<at::Tensor(const at::Tensor&)> change);

// Calls `visit` with each defined tensor.
void for_each_tensor(
    const c10::FunctionSchema& schema,
    c10::ArrayRef<c10::IValue> arguments,
    c10::function_ref<void(const at::Tensor&, bool is_written)> visit);

// The CUDA device of the tensors. Throws c10::Error if there are two.
std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments);

} // namespace torchkv::mock_cuda

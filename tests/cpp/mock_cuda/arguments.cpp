#include "arguments.h"

#include <ATen/core/List.h>
#include <c10/util/Exception.h>

#include <vector>

namespace torchkv::mock_cuda {

c10::IValue with_tensors(
    const c10::IValue& value,
    c10::function_ref<at::Tensor(const at::Tensor&)> change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? change(value.toTensor()) : value;
  }
  if (value.isTensorList()) {
    std::vector<at::Tensor> tensors;
    for (const auto& tensor : value.toTensorVector()) {
      tensors.push_back(change(tensor));
    }
    return tensors;
  }
  if (value.isOptionalTensorList()) { // the indices of index_put_
    c10::List<std::optional<at::Tensor>> tensors;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      tensors.push_back(
          tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    }
    return tensors;
  }
  return value;
}

void for_each_tensor(
    const c10::FunctionSchema& schema,
    c10::ArrayRef<c10::IValue> arguments,
    c10::function_ref<void(const at::Tensor&, bool is_written)> visit) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    with_tensors(arguments[i], [&](const at::Tensor& tensor) {
      visit(tensor, is_written(schema.arguments()[i]));
      return tensor;
    });
  }
}

std::optional<c10::Device> device_of(c10::ArrayRef<c10::IValue> arguments) {
  std::optional<c10::Device> device;
  for (const auto& argument : arguments) {
    with_tensors(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) {
        TORCH_CHECK(
            !device || *device == tensor.device(),
            "mock_cuda: expected tensors of one device, but got ",
            *device,
            " and ",
            tensor.device());
        device = tensor.device();
      }
      return tensor;
    });
  }
  return device;
}

} // namespace torchkv::mock_cuda

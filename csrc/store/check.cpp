#include "check.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <string>

#include "../core/text.h"

namespace torchkv {
namespace {

// "torch.float32"
std::string dtype_name(c10::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

// Quantised, packed (fp4) and bits dtypes have no sum.
bool can_add(c10::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true) ||
      c10::isComplexType(dtype) || c10::isFloat8Type(dtype) ||
      dtype == c10::kHalf || dtype == c10::kBFloat16 || dtype == c10::kFloat ||
      dtype == c10::kDouble;
}

void check_shape(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.sizes() == c10::IntArrayRef(meta.sizes),
      op,
      ": expected shape ",
      c10::IntArrayRef(meta.sizes),
      ", but got ",
      tensor.sizes(),
      " ",
      key.context());
}

// Whether it is what nearly all tensors are, to which nothing below objects:
// plain, contiguous, of the stored dtype and shape. Checks take a fifth of a
// call's time on the host otherwise.
bool is_usual(const Meta& meta, const at::Tensor& tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kUsual{
      DispatchKey::CPU,
      DispatchKey::CUDA,
      DispatchKey::ADInplaceOrView,
      DispatchKey::AutogradCPU,
      DispatchKey::AutogradCUDA,
      DispatchKey::AutocastCPU,
      DispatchKey::AutocastCUDA};
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  if ((impl.key_set().raw_repr() & ~kUsual.raw_repr()) != 0 ||
      !tensor.defined() || tensor.scalar_type() != meta.dtype ||
      !impl.is_contiguous() || !impl.has_storage()) {
    return false;
  }
  const auto sizes = impl.sizes();
  if (sizes.size() != meta.sizes.size()) {
    return false;
  }
  for (size_t i = 0; i < meta.sizes.size(); ++i) {
    if (sizes[i] != meta.sizes[i]) {
      return false;
    }
  }
  // No memory has so many; fewer, times their size, are a number of 64 bits.
  constexpr int64_t kMany = 1'000'000'000'000'000;
  const int64_t end = impl.storage_offset() + meta.num_elements;
  return end < kMany &&
      static_cast<size_t>(end) * impl.itemsize() <= impl.storage().nbytes();
}

} // namespace

size_t needed_storage_bytes(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? 0
                             : at::detail::computeStorageNbytes(
                                   tensor.sizes(),
                                   tensor.strides(),
                                   tensor.element_size(),
                                   tensor.storage_offset());
}

void check_storable(const char* op, const Key& key, const at::Tensor& tensor) {
  TORCH_CHECK_TYPE(
      tensor.defined(),
      op,
      ": expected a tensor, but got an undefined one ",
      key.context());
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided,
      op,
      ": expected a dense tensor, but got one of layout ",
      tensor.layout(),
      ", which is not supported yet ",
      key.context());
  TORCH_CHECK_NOT_IMPLEMENTED(
      !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
          !tensor.key_set().has(c10::DispatchKey::Functionalize) &&
          tensor.has_storage() && !tensor.is_nested(),
      op,
      ": expected a plain tensor with memory of its own, but got a wrapper "
      "(such as a FakeTensor, DTensor, nested tensor or a tensor under torch.func); "
      "hand over the tensor inside it ",
      key.context());
  const c10::Device device = tensor.device();
  TORCH_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() ||
          (!device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type())),
      op,
      ": expected a tensor with data, on the CPU or an accelerator, but got one "
      "on device ",
      device,
      " ",
      key.context());
  const c10::ScalarType dtype = tensor.scalar_type();
  TORCH_CHECK_NOT_IMPLEMENTED(
      can_add(dtype),
      op,
      ": expected a dtype that can be added, but got ",
      dtype_name(dtype),
      " ",
      key.context());
  const size_t needed_bytes = needed_storage_bytes(tensor);
  TORCH_CHECK_VALUE(
      needed_bytes <= tensor.storage().nbytes(),
      op,
      ": expected a tensor with a storage of at least ",
      needed_bytes,
      " bytes, which its shape, strides and offset need, but got one whose "
      "storage was resized to ",
      tensor.storage().nbytes(),
      " bytes ",
      key.context());
}

void check_value(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& value) {
  if (is_usual(meta, value)) {
    return;
  }
  check_storable(op, key, value);
  check_shape(op, key, meta, value);
  TORCH_CHECK_TYPE(
      c10::canCast(value.scalar_type(), meta.dtype),
      op,
      ": expected a value that converts to ",
      dtype_name(meta.dtype),
      ", but got ",
      dtype_name(value.scalar_type()),
      " ",
      key.context());
}

void check_out(
    const char* op,
    const Key& key,
    const Meta& meta,
    const at::Tensor& out) {
  if (is_usual(meta, out)) {
    return;
  }
  check_storable(op, key, out);
  TORCH_CHECK_VALUE(
      !out._is_zerotensor(),
      op,
      ": expected an out that can be written, but got a ZeroTensor ",
      key.context());
  check_shape(op, key, meta, out);
  TORCH_CHECK_TYPE(
      c10::canCast(meta.dtype, out.scalar_type()),
      op,
      ": expected an out that ",
      dtype_name(meta.dtype),
      " converts to, but got ",
      dtype_name(out.scalar_type()),
      " ",
      key.context());
  TORCH_CHECK_VALUE(
      at::has_internal_overlap(out) != at::MemOverlap::Yes,
      op,
      ": expected an out whose elements lie apart in memory, but got an "
      "expanded one of strides ",
      out.strides(),
      "; clone it first ",
      key.context());
}

void check_optimizable(const char* op, const Key& key, const Meta& meta) {
  TORCH_CHECK_TYPE(
      c10::isFloatingType(meta.dtype) || c10::isComplexType(meta.dtype),
      op,
      ": expected a stored value of floating-point or complex dtype, as the "
      "store has an optimizer, but got ",
      dtype_name(meta.dtype),
      " ",
      key.context());
}

void check_counter(
    const char* op,
    const Key& key,
    const char* name,
    int64_t count) {
  constexpr int64_t kMost = 9007199254740992; // 2^53: fp64 counts so far
  TORCH_CHECK_VALUE(
      count >= 0 && count <= kMost,
      op,
      ": expected ",
      name,
      " to be from 0 to ",
      kMost,
      ", but got ",
      count,
      " ",
      key.context());
}

void check_state(
    const char* op,
    const Key& key,
    const Meta& meta,
    const RuleSpec& rule,
    const KeyState& state) {
  const auto names = state_names(rule);
  if (!state.tensors.empty()) {
    check_optimizable(op, key, meta);
  }
  const auto arithmetic =
      state.tensors.empty() ? meta.dtype : at::toOpMathType(meta.dtype);
  const auto is_known = [&](const std::string& name) {
    return (name == "master" && arithmetic != meta.dtype) ||
        name == "accumulated" ||
        std::any_of(names.begin(), names.end(), [&](const char* known) {
             return known != nullptr && name == known;
           });
  };
  check_counter(op, key, "step", state.step);
  check_counter(op, key, "num_accumulated", state.num_accumulated);
  TORCH_CHECK_VALUE(
      (state.num_accumulated == 0) == (state.tensors.count("accumulated") == 0),
      op,
      ": expected the state 'accumulated' exactly where num_accumulated is not "
      "0, but got num_accumulated ",
      state.num_accumulated,
      " ",
      key.context());
  for (const auto& [name, tensor] : state.tensors) {
    TORCH_CHECK_VALUE(
        is_known(name),
        op,
        ": expected a state of the optimizer '",
        name_of(rule),
        "', but got ",
        quoted(name),
        " ",
        key.context());
    check_storable(op, key, tensor);
    check_shape(op, key, meta, tensor);
    TORCH_CHECK_VALUE(
        c10::canCast(tensor.scalar_type(), arithmetic),
        op,
        ": expected a state that converts to ",
        dtype_name(arithmetic),
        ", but got ",
        dtype_name(tensor.scalar_type()),
        " ",
        key.context());
  }
  // What options ask for (AMSGrad, a momentum) is not there yet where they were
  // switched on after the last step.
  RuleSpec plain;
  plain.id = rule.id;
  for (const char* name : state_names(plain)) {
    TORCH_CHECK_VALUE(
        name == nullptr || state.step == 0 || state.tensors.count(name) != 0,
        op,
        ": expected the state '",
        name,
        "', but got none ",
        key.context());
  }
}

void check_count(const char* op, const Keys& keys, const Tensors& tensors) {
  TORCH_CHECK_VALUE(
      keys.size() != 0, op, ": expected at least one key, but got none");
  TORCH_CHECK_VALUE(
      tensors.size() == keys.size(),
      op,
      ": expected ",
      keys.size(),
      " values, one for each key, but got ",
      tensors.size(),
      " ",
      keys.context());
  for (int64_t i = 0; i < keys.size(); ++i) {
    TORCH_CHECK_VALUE(
        !tensors.of(i).empty(),
        op,
        ": expected at least one tensor, but got an empty list ",
        keys.list[i].context());
  }
}

} // namespace torchkv

#include "check.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <limits>
#include <string>

#include "../comm/backends.h"
#include "../core/errors.h"
#include "../core/row_sparse.h"
#include "../kernels/cpu/row_memory.h"
#include "../memory/layout.h"
#include "row_values.h"

namespace torchkv {
namespace {

// Quantised, packed (fp4) and bits dtypes cannot be summed.
bool can_add(c10::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true) ||
      c10::isComplexType(dtype) || c10::isFloat8Type(dtype) ||
      dtype == c10::kHalf || dtype == c10::kBFloat16 || dtype == c10::kFloat ||
      dtype == c10::kDouble;
}

// Whether a tensor passes every check below, as it is plain, contiguous, and of
// the stored dtype and shape. The checks take a fifth of a call's host time.
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
  // More than fit in memory; fewer, in bytes, do not overflow 64 bits.
  constexpr int64_t kMany = 1'000'000'000'000'000;
  const int64_t end = impl.storage_offset() + meta.num_elements;
  return end < kMany &&
      static_cast<size_t>(end) * impl.itemsize() <= impl.storage().nbytes();
}

// Both return whether the tensor is usual, and in CPU memory.
bool check_value(const char* op, const Entry& entry, const Value& value) {
  const Meta& meta = entry.meta;
  if (value.dense() != nullptr && is_usual(meta, *value.data)) {
    return value.data->is_cpu();
  }
  const Where where{op, entry.key};
  check_storable(where, *value.data);
  check_shape(
      where,
      meta,
      value.dense() != nullptr ? value.data->sizes() : value.encoding->sizes);
  TORCHKV_CHECK_TYPE(
      c10::canCast(value.dtype(), meta.dtype),
      where,
      "expected a value that converts to ",
      dtype_name(meta.dtype),
      ", but got ",
      dtype_name(value.dtype()));
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      value.dense() != nullptr || has_backend(value.encoding->form),
      where,
      "expected a value of a form that has a backend, but got '",
      value.encoding->form,
      "'");
  return false;
}

bool check_out(const char* op, const Entry& entry, const at::Tensor& out) {
  const Meta& meta = entry.meta;
  if (is_usual(meta, out)) {
    return out.is_cpu();
  }
  const Where where{op, entry.key};
  check_storable(where, out);
  TORCHKV_CHECK_VALUE(
      !out._is_zerotensor(),
      where,
      "expected an out that can be written, but got a ZeroTensor");
  check_shape(where, meta, out.sizes());
  TORCHKV_CHECK_TYPE(
      c10::canCast(meta.dtype, out.scalar_type()),
      where,
      "expected an out that ",
      dtype_name(meta.dtype),
      " converts to, but got ",
      dtype_name(out.scalar_type()));
  TORCHKV_CHECK_VALUE(
      at::has_internal_overlap(out) != at::MemOverlap::Yes,
      where,
      "expected an out without overlapping elements, but got an expanded one "
      "of strides ",
      out.strides(),
      "; clone it first");
  return false;
}

} // namespace

std::string dtype_name(c10::ScalarType dtype) {
  return c10::str("torch.", c10::getDtypeNames(dtype).first);
}

Meta row_sparse_meta(
    const Where& where,
    std::optional<int64_t> num_rows,
    c10::IntArrayRef row_shape,
    c10::ScalarType dtype) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  Meta meta;
  meta.dtype = dtype;
  meta.is_row_sparse = true;
  meta.has_unlimited_rows = !num_rows;
  meta.sizes.push_back(num_rows.value_or(0));
  meta.sizes.append(row_shape.begin(), row_shape.end());
  int64_t most = kMost; // rows
  bool is_valid = true;
  for (const int64_t size : row_shape) {
    is_valid = is_valid && size >= 0;
    most /= std::max(size, int64_t{1});
  }
  TORCHKV_CHECK_VALUE(
      is_valid && meta.sizes[0] >= 0 && most > 0 && meta.sizes[0] <= most,
      where,
      "expected sizes of at least 0 and less than 2^63 elements, but got ",
      num_rows ? c10::str(*num_rows) : std::string("any number of"),
      " rows of shape ",
      row_shape);
  if (!num_rows) {
    meta.sizes[0] = most;
  }
  meta.num_elements = meta.sizes[0] * meta.row_size();
  return meta;
}

void check_row_init(const Where& where, const Meta& meta, const RowInit& init) {
  TORCHKV_CHECK_VALUE(
      init.id == RowInit::Id::kZeros || kernels::cpu::can_init(meta.dtype),
      where,
      "expected rows of dtype torch.float16, torch.bfloat16, torch.float32 or "
      "torch.float64 for the initial value '",
      name_of(init),
      "', but got ",
      dtype_name(meta.dtype));
  check_dtype(where, meta.dtype);
}

void check_shape(const Where& where, const Meta& meta, c10::IntArrayRef sizes) {
  const c10::IntArrayRef expected = meta.sizes;
  TORCHKV_CHECK_VALUE(
      sizes == expected,
      where,
      "expected shape ",
      expected,
      ", but got ",
      sizes);
}

void check_rows_fit(
    const Where& where,
    const at::Tensor& ids,
    const at::Tensor& out) {
  const int64_t count = ids.numel();
  const int64_t last =
      count == 0 ? -1 : ids.const_data_ptr<int64_t>()[count - 1];
  TORCHKV_CHECK_VALUE(
      last < out.size(0),
      where,
      "expected a sparse out with rows up to ",
      last,
      ", but got one of shape ",
      out.sizes());
}

void check_rows_shape(
    const Where& where,
    const Meta& meta,
    c10::IntArrayRef sizes) {
  const c10::IntArrayRef expected = meta.sizes;
  if (!meta.has_unlimited_rows) {
    check_shape(where, meta, sizes);
    return;
  }
  TORCHKV_CHECK_VALUE(
      !sizes.empty() && sizes.slice(1) == expected.slice(1),
      where,
      "expected rows of shape ",
      expected.slice(1),
      ", but got a value of shape ",
      sizes);
}

void check_dtype(const Where& where, c10::ScalarType dtype) {
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      can_add(dtype),
      where,
      "expected a dtype that can be summed, but got ",
      dtype_name(dtype));
}

void check_not_capturing(
    const Where& where,
    Runtime& runtime,
    c10::Device device,
    const char* what) {
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() || !runtime.is_capturing(runtime.current_stream(device)),
      where,
      "expected no capture into a CUDA graph of values that are ",
      what,
      ", but got one on device ",
      device);
}

void check_not_capturing(
    const Where& where,
    Runtime& runtime,
    const Entry& entry,
    const char* what) {
  for (const auto& slice : entry.slices) {
    check_not_capturing(where, runtime, slice.home.device, what);
  }
}

void check_storable(const Where& where, const at::Tensor& tensor) {
  TORCHKV_CHECK_TYPE(
      tensor.defined(), where, "expected a tensor, but got an undefined one");
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      tensor.layout() == c10::kStrided,
      where,
      "expected a dense tensor, but got one of layout ",
      tensor.layout(),
      ", which is not supported yet");
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
          !tensor.key_set().has(c10::DispatchKey::Functionalize) &&
          tensor.has_storage() && !tensor.is_nested(),
      where,
      "expected a plain tensor with its own memory, but got a wrapper "
      "(such as a FakeTensor, DTensor, nested tensor or a tensor under torch.func); "
      "pass the tensor inside it");
  const c10::Device device = tensor.device();
  TORCHKV_CHECK_NOT_IMPLEMENTED(
      device.is_cpu() ||
          (!device.is_meta() && c10::impl::hasDeviceGuardImpl(device.type())),
      where,
      "expected a tensor with data, on the CPU or an accelerator, but got one "
      "on device ",
      device);
  check_dtype(where, tensor.scalar_type());
  const size_t needed_bytes = needed_storage_bytes(tensor);
  TORCHKV_CHECK_VALUE(
      needed_bytes <= tensor.storage().nbytes(),
      where,
      "expected a tensor with a storage of at least ",
      needed_bytes,
      " bytes, which its shape, strides and offset need, but got one whose "
      "storage was resized to ",
      tensor.storage().nbytes(),
      " bytes");
}

bool check_values(const Call& call, const Entries& entries) {
  if (call.values == nullptr) {
    return true;
  }
  const Tensors& values = *call.values;
  check_count(call.op, call.keys, values);
  bool are_usual = true;
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto number = static_cast<int64_t>(i);
    for (int64_t j = values.begin(number); j < values.ends[i]; ++j) {
      are_usual =
          check_value(call.op, *entries[i], values.value(j)) && are_usual;
    }
  }
  return are_usual;
}

bool check_outs(const Call& call, const Entries& entries) {
  if (call.outs == nullptr) {
    return true;
  }
  check_count(call.op, call.keys, *call.outs);
  bool are_usual = true;
  for (size_t i = 0; i < entries.size(); ++i) {
    for (const auto& out : call.outs->of(static_cast<int64_t>(i))) {
      are_usual = check_out(call.op, *entries[i], out) && are_usual;
    }
  }
  return are_usual;
}

void check_not_empty(const char* op, const Keys& keys) {
  TORCH_CHECK_VALUE(
      keys.size() != 0, op, ": expected at least one key, but got none");
}

void check_one_each(const Call& call, bool takes_rows, bool takes_encoded) {
  const char* op = call.op;
  const Keys& keys = call.keys;
  check_count(op, keys, *call.values);
  for (int64_t i = 0; i < keys.size(); ++i) {
    const Where where{op, keys.list[i]};
    const size_t size = call.values->of(i).size();
    TORCHKV_CHECK_VALUE(
        size == 1, where, "expected one tensor, but got a list of ", size);
    const Value value = call.values->value(i);
    if ((takes_rows && value.dense() != nullptr &&
         is_sparse_coo(*value.data)) ||
        (takes_encoded && rows_in(value) != nullptr)) {
      continue;
    }
    TORCHKV_CHECK_NOT_IMPLEMENTED(
        value.dense() != nullptr,
        where,
        "expected a dense tensor, but got a value of form '",
        value.encoding->form,
        "'");
    check_storable(where, *value.data);
  }
}

void check_no_repeats(const char* op, const Entries& entries) {
  ska::flat_hash_set<const Entry*> seen;
  for (const auto& entry : entries) {
    const Where where{op, entry->key};
    TORCHKV_CHECK_VALUE(
        seen.insert(entry.get()).second,
        where,
        "expected distinct keys, but got a repeated one");
  }
}

void check_count(const char* op, const Keys& keys, const Tensors& tensors) {
  check_not_empty(op, keys);
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
    const Where where{op, keys.list[i]};
    TORCHKV_CHECK_VALUE(
        !tensors.of(i).empty(),
        where,
        "expected at least one tensor, but got an empty list");
  }
}

void check_optimizable(const char* op, const Entry& entry) {
  const Where where{op, entry.key};
  const c10::ScalarType dtype = entry.meta.dtype;
  TORCHKV_CHECK_TYPE(
      c10::isFloatingType(dtype) || c10::isComplexType(dtype),
      where,
      "expected a stored value of floating-point or complex dtype, as the "
      "store has an optimizer, but got ",
      dtype_name(dtype));
}

} // namespace torchkv

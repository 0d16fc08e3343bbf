// Comm for every device that PyTorch knows. Which tensors can go through the
// raw CPU kernels is decided here; the arithmetic is in kernels/cpu.
#include "comm_aten.h"

#include <ATen/Functions.h>
#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "../errors.h"
#include "../kernels/cpu/sum.h"
#include "../plain_dispatch.h"

namespace torchkv {
namespace {

// Whether the tensor's memory holds its numbers as they are.
bool is_plain_cpu(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor._is_zerotensor();
}

bool is_same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides();
}

// PyTorch promotes fp8 with nothing but itself, and uint16, uint32 and uint64
// with no integer. int64 holds the same bits of a sum of integers as any of
// them.
c10::ScalarType promotable(c10::ScalarType dtype) {
  if (c10::isFloat8Type(dtype)) {
    return c10::kFloat;
  }
  return c10::isBarebonesUnsignedType(dtype) ? c10::kLong : dtype;
}

c10::ScalarType accumulation_type(
    c10::ArrayRef<Value> values,
    c10::ScalarType stored) {
  c10::ScalarType dtype = promotable(stored);
  for (const auto& value : values) {
    dtype = c10::promoteTypes(dtype, promotable(value.data->scalar_type()));
  }
  return at::toOpMathType(dtype);
}

// The caller's tensor has been written below autograd, which does not count
// versions: an autograd graph that saved it must still notice.
void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// The device guard and the stream order of everything done to one slice.
class Access {
 public:
  Access(Runtime& runtime, Slice& slice) : runtime_(runtime), slice_(slice) {
    if (!slice.home.is_cpu()) {
      guard_.reset_device(slice.home);
    }
    slice.timeline.enter(
        runtime, slice.home, {slice.value, slice.merge_buffer});
  }
  ~Access() {
    try {
      slice_.timeline.leave(runtime_, slice_.home);
    } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
      // Recording an event fails only after the device itself has, and every
      // later call on it reports that.
    }
  }
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
  Access(Access&&) = delete;
  Access& operator=(Access&&) = delete;

 private:
  Runtime& runtime_;
  Slice& slice_;
  c10::OptionalDeviceGuard guard_;
};

} // namespace

at::Tensor CommAten::allocate(
    const at::Tensor& model,
    c10::Device device,
    bool for_the_store) {
  // A dense value keeps its memory format (channels_last, transposed), so that
  // gradients of the same format are added without a permuting copy.
  const auto strides = model.is_non_overlapping_and_dense()
      ? c10::SmallVector<int64_t, 4>(model.strides())
      : c10::SmallVector<int64_t, 4>(at::detail::defaultStrides(model.sizes()));
  at::Tensor result =
      runtime_.allocate(model.sizes(), strides, model.scalar_type(), device);
  if (for_the_store) {
    forbid_resize(result);
  }
  return result;
}

Slice CommAten::make_slice(const at::Tensor& value, c10::Device home) {
  Slice slice;
  slice.end = value.numel();
  slice.home = home;
  slice.value = allocate(value, home, /*for_the_store=*/true);
  {
    // Ends before the slice moves: it notes its event in the slice.
    const Access access(runtime_, slice);
    runtime_.copy(slice.value, value);
  }
  return slice;
}

void CommAten::store(Entry& entry, const at::Tensor& value) {
  const c10::Device home =
      home_ == Home::kCpu ? c10::Device(c10::kCPU) : value.device();
  entry.slices.push_back(make_slice(value, home));
  entry.placed = home_ == Home::kCpu || !home.is_cpu();
}

void CommAten::place(Entry& entry, at::TensorList tensors) {
  for (const auto& tensor : tensors) {
    if (!entry.placed && !tensor.device().is_cpu()) {
      entry.slices[0] = make_slice(entry.slices[0].value, tensor.device());
      entry.placed = true;
    }
  }
}

void CommAten::copy(const at::Tensor& value, const at::Tensor& result) {
  if (is_plain_cpu(value) && is_plain_cpu(result) &&
      is_same_layout(value, result) && value.is_non_overlapping_and_dense()) {
    kernels::cpu::copy(value, result);
  } else {
    runtime_.copy(result, value);
  }
}

void CommAten::sum(c10::ArrayRef<Value> values, const at::Tensor& result) {
  if (result.numel() == 0) {
    return;
  }
  if (values.size() == 1) {
    copy(*values[0].data, result);
    return;
  }
  const bool on_cpu = result.device().is_cpu() &&
      std::all_of(values.begin(), values.end(), [](const Value& value) {
                        return is_plain_cpu(*value.data);
                      });
  if (on_cpu) {
    const bool same_layout =
        std::all_of(values.begin(), values.end(), [&](const Value& value) {
          return is_same_layout(*value.data, result);
        });
    kernels::cpu::sum(
        values,
        result,
        accumulation_type(values, result.scalar_type()),
        same_layout);
    return;
  }
  const PlainDispatch plain;
  const auto dtype = accumulation_type(values, result.scalar_type());
  const auto brought = [&](const Value& value, bool copy) {
    return value.data->to(result.device(), dtype, /*non_blocking=*/false, copy);
  };
  at::Tensor total = brought(values[0], /*copy=*/true);
  for (const auto& value : values.slice(1)) {
    total.add_(brought(value, /*copy=*/false));
  }
  runtime_.copy(result, total);
}

void CommAten::reduce_update(c10::ArrayRef<Item> items, const RuleSpec& rule) {
  TORCHKV_INTERNAL_ASSERT(rule.id == RuleSpec::Id::kAssign);
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    const Access access(runtime_, slice);
    sum(item.values, slice.value);
  }
}

void CommAten::reduce(const Item& item, Update update) {
  Slice& slice = item.entry->slices[0];
  const Access access(runtime_, slice);
  if (!slice.merge_buffer.defined()) {
    slice.merge_buffer =
        allocate(slice.value, slice.home, /*for_the_store=*/true);
  }
  sum(item.values, slice.merge_buffer);
  update(slice.merge_buffer, slice.value);
}

at::Tensor CommAten::copy_of(Entry& entry) {
  Slice& slice = entry.slices[0];
  const Access access(runtime_, slice);
  at::Tensor result =
      allocate(slice.value, slice.home, /*for_the_store=*/false);
  copy(slice.value, result);
  return result;
}

void CommAten::copy_out(c10::ArrayRef<Item> items) {
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    const Access access(runtime_, slice);
    for (const auto& out : item.outs) {
      copy(slice.value, out);
      bump_version(out);
    }
  }
}

} // namespace torchkv

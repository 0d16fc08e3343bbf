// Comm for every device that PyTorch knows. Which tensors can go through the
// raw CPU kernels is decided here; the arithmetic is in kernels/.
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

// Whether the raw kernels can copy one into the other. Both have one shape.
bool is_plain_copy(const at::Tensor& source, const at::Tensor& out) {
  return is_plain_cpu(source) && is_plain_cpu(out) &&
      source.scalar_type() == out.scalar_type() &&
      kernels::cpu::lie_alike(source, out) &&
      source.is_non_overlapping_and_dense();
}

// The memory from a tensor's first element to behind its last.
struct Extent {
  const char* begin = nullptr;
  const char* end = nullptr;
};

Extent extent_of(const at::Tensor& tensor) {
  const auto* data = static_cast<const char*>(tensor.const_data_ptr());
  if (tensor.numel() == 0) {
    return {data, data};
  }
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    last += (tensor.size(i) - 1) * tensor.stride(i);
  }
  return {
      data, data + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// Whether two outs may share memory, by the extents that they span.
bool may_overlap(c10::ArrayRef<Item> items) {
  c10::SmallVector<Extent, 4> extents;
  bool ascending = true;
  for (const auto& item : items) {
    for (const auto& out : item.outs) {
      extents.push_back(extent_of(out));
      const size_t n = extents.size();
      ascending =
          ascending && (n == 1 || extents[n - 2].end <= extents[n - 1].begin);
    }
  }
  if (ascending) {
    return false;
  }
  std::sort(extents.begin(), extents.end(), [](const auto& a, const auto& b) {
    return a.begin < b.begin;
  });
  const auto* overlap = std::adjacent_find(
      extents.begin(), extents.end(), [](const auto& a, const auto& b) {
        return a.end > b.begin;
      });
  return overlap != extents.end();
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
    if (slice.home.is_cpu()) {
      return; // work is done when a call returns
    }
    guard_.reset_device(slice.home);
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
  if (is_plain_copy(value, result)) {
    kernels::cpu::CopyBatch batch;
    batch.add(value, result);
    batch.run();
  } else {
    runtime_.copy(result, value);
  }
}

// The sum through ATen operators, then the rule: for values of several devices
// and such as the raw kernels cannot read.
void CommAten::reduce_apart(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleSpec& rule) {
  const bool is_assign = rule.id == RuleSpec::Id::kAssign;
  if (is_assign && values.size() == 1) {
    runtime_.copy(stored, *values[0].data);
    return;
  }
  const PlainDispatch plain;
  const auto brought = [&](const Value& value, bool copy) {
    return value.data->to(
        stored.device(), accumulation, /*non_blocking=*/false, copy);
  };
  at::Tensor total = brought(values[0], /*copy=*/true);
  for (const auto& value : values.slice(1)) {
    total.add_(brought(value, /*copy=*/false));
  }
  if (!is_assign) {
    TORCHKV_INTERNAL_ASSERT(rule.id == RuleSpec::Id::kSgd);
    const at::Tensor weight = stored.to(accumulation);
    if (rule.weight_decay != 0) {
      total.add_(weight, rule.weight_decay);
    }
    // weight - learning_rate * total, rounded as the CPU kernel rounds it.
    total = weight.sub(total.mul_(rule.learning_rate));
  }
  runtime_.copy(stored, total);
}

void CommAten::reduce_update(c10::ArrayRef<Item> items, const RuleSpec& rule) {
  kernels::cpu::SumBatch batch(rule);
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    const Access access(runtime_, slice);
    reduce_into(item.values, slice.value, rule, batch);
  }
  batch.run();
}

// Adds the sum to the batch, or carries it out.
void CommAten::reduce_into(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    const RuleSpec& rule,
    kernels::cpu::SumBatch& batch) {
  if (result.numel() == 0) {
    return;
  }
  const auto dtype = accumulation_type(values, result.scalar_type());
  const bool on_cpu = result.device().is_cpu() &&
      std::all_of(values.begin(), values.end(), [](const Value& value) {
                        return is_plain_cpu(*value.data);
                      });
  if (!on_cpu) {
    reduce_apart(values, result, dtype, rule);
    return;
  }
  const bool alike =
      std::all_of(values.begin(), values.end(), [&](const Value& value) {
        return kernels::cpu::lie_alike(*value.data, result);
      });
  if (alike) {
    batch.add(values, result, dtype);
  } else {
    kernels::cpu::sum_strided(values, result, dtype, rule);
  }
}

void CommAten::reduce(const Item& item, Update update) {
  Slice& slice = item.entry->slices[0];
  const Access access(runtime_, slice);
  if (!slice.merge_buffer.defined()) {
    slice.merge_buffer =
        allocate(slice.value, slice.home, /*for_the_store=*/true);
  }
  constexpr RuleSpec kAssign;
  kernels::cpu::SumBatch batch(kAssign);
  reduce_into(item.values, slice.merge_buffer, kAssign, batch);
  batch.run();
  update(slice.merge_buffer, slice.value);
}

at::Tensor CommAten::empty_like(const Entry& entry) {
  const Slice& slice = entry.slices[0];
  return allocate(slice.value, slice.home, /*for_the_store=*/false);
}

void CommAten::copy_out(c10::ArrayRef<Item> items) {
  // Outs that share memory are written one after another: the last one counts.
  const bool one_by_one = may_overlap(items);
  kernels::cpu::CopyBatch batch;
  for (const auto& item : items) {
    Slice& slice = item.entry->slices[0];
    const Access access(runtime_, slice);
    for (const auto& out : item.outs) {
      if (!one_by_one && is_plain_copy(slice.value, out)) {
        batch.add(slice.value, out);
      } else {
        copy(slice.value, out);
      }
      bump_version(out);
    }
  }
  batch.run();
}

} // namespace torchkv

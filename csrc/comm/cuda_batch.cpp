#include "cuda_batch.h"

#include <ATen/OpMathType.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>

#include "../kernels/cuda/library.h"

namespace torchkv {
namespace {

using kernels::cuda::Dtype;
using kernels::cuda::SumJob;

struct Elements {
  Dtype dtype;
  int64_t per_number; // 2 of a complex number
};

// How the kernels see a dtype, if they do.
std::optional<Elements> elements_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kFloat:
      return Elements{Dtype::kFloat, 1};
    case c10::kHalf:
      return Elements{Dtype::kHalf, 1};
    case c10::kBFloat16:
      return Elements{Dtype::kBFloat16, 1};
    case c10::kDouble:
      return Elements{Dtype::kDouble, 1};
    case c10::kComplexFloat:
      return Elements{Dtype::kFloat, 2};
    case c10::kComplexHalf:
      return Elements{Dtype::kHalf, 2};
    case c10::kComplexDouble:
      return Elements{Dtype::kDouble, 2};
    case c10::kBool:
      return Elements{Dtype::kBool, 1};
    case c10::kByte:
    case c10::kChar:
      return Elements{Dtype::kInt8, 1};
    case c10::kShort:
    case c10::kUInt16:
      return Elements{Dtype::kInt16, 1};
    case c10::kInt:
    case c10::kUInt32:
      return Elements{Dtype::kInt32, 1};
    case c10::kLong:
    case c10::kUInt64:
      return Elements{Dtype::kInt64, 1};
    default:
      return std::nullopt;
  }
}

// The type in which the kernels add such numbers up.
c10::ScalarType sum_type(c10::ScalarType dtype) {
  return c10::isIntegralType(dtype, /*includeBool=*/true)
      ? dtype
      : at::toOpMathType(dtype);
}

bool are_of(c10::ArrayRef<Value> values, c10::ScalarType dtype) {
  return std::all_of(values.begin(), values.end(), [&](const Value& value) {
    return value.data->scalar_type() == dtype;
  });
}

} // namespace

CudaBatch::Home::Home(const Place& place_, void* stream)
    : place(place_),
      launches(
          *kernels::cuda::table(),
          kernels::cuda::num_multiprocessors(place_.device),
          stream) {}

kernels::cuda::Launches& CudaBatch::launches_of(const Place& place) {
  for (const auto& home : homes_) {
    if (home->place == place) {
      return home->launches;
    }
  }
  homes_.push_back(
      std::make_unique<Home>(place, order_.stream(place).native_handle()));
  return homes_.back()->launches;
}

// Whether kernels of the stored value's device can use the tensor as it lies.
bool CudaBatch::is_plain(const at::Tensor& tensor, const at::Tensor& stored) {
  return tensor.is_cuda() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor._is_zerotensor() && kernels::cpu::lie_alike(tensor, stored) &&
      peers_.may_use(stored.device(), tensor.device());
}

// Where kernels find the value in `dtype`: at home, or in a copy.
const void* CudaBatch::address_of(
    const at::Tensor& value,
    const at::Tensor& stored,
    const Place& home,
    c10::ScalarType dtype) {
  order_.use(home, value.device());
  if (value.scalar_type() == dtype && is_plain(value, stored)) {
    return value.const_data_ptr();
  }
  staged_.push_back(runtime_.allocate(
      stored.sizes(), stored.strides(), dtype, stored.device()));
  runtime_.copy(staged_.back(), value);
  return staged_.back().const_data_ptr();
}

bool CudaBatch::add(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    const Place& home,
    c10::ScalarType accumulation,
    const RuleStep& step,
    const kernels::cpu::State& state) {
  if (!stored.is_cuda() || kernels::cuda::table() == nullptr) {
    return false;
  }
  const auto kept = elements_of(stored.scalar_type());
  if (!kept) {
    return false;
  }
  SumJob job;
  job.stored_dtype = kept->dtype;
  job.num_values = values.size();
  job.step = &step;
  // In the dtype that all have; or with a sum before the others; or converted.
  const auto last = values.back().data->scalar_type();
  const auto has_kernel = [&](c10::ScalarType dtype, bool first_is_sum) {
    const auto elements = elements_of(dtype);
    if (!elements || elements->per_number != kept->per_number ||
        sum_type(dtype) != accumulation) {
      return false;
    }
    job.value = elements->dtype;
    job.first_is_sum = first_is_sum;
    return kernels::cuda::Launches::supports(job);
  };
  c10::ScalarType dtype = last;
  const bool as_they_are = are_of(values, last)
      ? has_kernel(last, false)
      : are_of(values[0], accumulation) && are_of(values.slice(1), last) &&
          has_kernel(last, true);
  if (!as_they_are) {
    dtype = accumulation;
    if (!has_kernel(dtype, false)) {
      return false;
    }
  }
  c10::SmallVector<const void*, 8> addresses;
  for (const auto& value : values) {
    const bool is_sum = job.first_is_sum && addresses.empty();
    addresses.push_back(
        address_of(*value.data, stored, home, is_sum ? accumulation : dtype));
  }
  const auto data = [](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
  };
  job.values = addresses.data();
  job.stored = stored.mutable_data_ptr();
  job.master = data(state.master);
  for (size_t i = 0; i < kMaxStates; ++i) {
    job.states[i] = data(state.states[i]);
  }
  job.num_elements = stored.numel() * kept->per_number;
  launches_of(home).add(job);
  return true;
}

bool CudaBatch::add_copy(
    const at::Tensor& source,
    const Place& home,
    const at::Tensor& out) {
  if (!source.is_cuda() || kernels::cuda::table() == nullptr ||
      source.scalar_type() != out.scalar_type() || !is_plain(out, source)) {
    return false;
  }
  if (source_ != &source) {
    flush_copy();
    source_ = &source;
    source_home_ = home;
  }
  order_.use(home, out.device());
  outs_.push_back(out.mutable_data_ptr());
  return true;
}

void CudaBatch::flush_copy() {
  if (!outs_.empty()) {
    const c10::DeviceGuard guard(source_home_.device); // of an earlier slice
    launches_of(source_home_)
        .add_copy(
            source_->const_data_ptr(),
            outs_.data(),
            outs_.size(),
            static_cast<int64_t>(source_->nbytes()));
    outs_.clear();
  }
}

void CudaBatch::run() {
  flush_copy();
  for (const auto& home : homes_) {
    const c10::DeviceGuard guard(home->place.device);
    kernels::cuda::check(home->launches.finish());
  }
  homes_.clear();
  staged_.clear();
}

} // namespace torchkv

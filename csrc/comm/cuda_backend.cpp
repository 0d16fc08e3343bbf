#include "cuda_backend.h"

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <optional>

#include "../core/plain_dispatch.h"
#include "../kernels/cuda/library.h"
#include "../memory/layout.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

using kernels::cuda::Launches;
using kernels::cuda::SumJob;

bool are_of(c10::ArrayRef<Value> values, c10::ScalarType dtype) {
  return std::all_of(values.begin(), values.end(), [&](const Value& value) {
    return value.dtype() == dtype;
  });
}

} // namespace

CudaBackend::Home::Home(const Place& place_, StreamOrder& order)
    : place(place_),
      launches(
          *kernels::cuda::table(),
          order.stream(place_).native_handle(),
          order.is_capturing(place_) ? kernels::cuda::kSmallParams
                                     : kernels::cuda::kLargeParams) {}

CudaBackend::Home& CudaBackend::home_of(const Place& place) {
  for (const auto& home : homes_) {
    if (home->place == place) {
      return *home;
    }
  }
  homes_.push_back(std::make_unique<Home>(place, order_));
  return *homes_.back();
}

bool CudaBackend::has_kernels(c10::Device device) {
  if (device_ == device) {
    return !device.is_cpu();
  }
  if (!device.is_cuda() || !kernels::cuda::has_kernels(device)) {
    return false;
  }
  device_ = device;
  return true;
}

// Whether kernels of the stored value's device can read the tensor directly.
bool CudaBackend::is_plain(const at::Tensor& tensor, const at::Tensor& stored) {
  const c10::Device device = tensor.device();
  return device.is_cuda() && torchkv::is_plain(tensor) &&
      same_layout(tensor, stored) &&
      (device == stored.device() ||
       may_use_peer(runtime_, stored.device(), device));
}

// The address of the value in `dtype`: its own, or that of a copy on the home.
const void* CudaBackend::address_of(
    const at::Tensor& value,
    const at::Tensor& stored,
    const Place& home,
    c10::ScalarType dtype) {
  order_.use(home, value.device());
  if (value.scalar_type() == dtype && is_plain(value, stored)) {
    return value.const_data_ptr();
  }
  staged_.push_back(runtime_.allocate_like(stored, dtype));
  order_.sync();
  runtime_.copy(staged_.back(), value);
  return staged_.back().const_data_ptr();
}

bool CudaBackend::prepare(Sum& sum, const Job& job) {
  const at::Tensor& result = *job.result;
  if (!has_kernels(result.device())) {
    return false;
  }
  const bool is_complex = c10::isComplexType(result.scalar_type());
  const auto stored = cuda_dtype(result.scalar_type());
  if (!stored) {
    return false;
  }
  SumJob& packed = sum.job;
  packed.stored_dtype = *stored;
  packed.num_values = job.values.size();
  packed.num_elements = result.numel() * (is_complex ? 2 : 1);
  packed.step = job.step;
  // All in one dtype, or a sum before such values, or else converted.
  const auto last = job.values.back().dtype();
  const auto has_kernel = [&](c10::ScalarType dtype, bool first_is_sum) {
    const auto value = cuda_dtype(dtype);
    if (!value || c10::isComplexType(dtype) != is_complex ||
        sum_type(dtype) != job.accumulation) {
      return false;
    }
    packed.value = *value;
    packed.first_is_sum = first_is_sum;
    return job.is_norm ? Launches::supports_norm(packed)
                       : Launches::supports(packed);
  };
  c10::ScalarType dtype = last;
  const auto has_kernel_after_sum = [&](c10::ScalarType of_others) {
    return are_of(job.values[0], job.accumulation) &&
        are_of(job.values.slice(1), of_others) && has_kernel(of_others, true);
  };
  const bool as_they_are = are_of(job.values, last)
      ? has_kernel(last, false) || has_kernel_after_sum(result.scalar_type())
      : has_kernel_after_sum(last);
  if (!as_they_are) {
    dtype = job.accumulation;
    if (!has_kernel(dtype, false)) {
      return false;
    }
  }
  for (const auto& value : job.values) {
    const bool is_sum = packed.first_is_sum && sum.addresses.empty();
    sum.addresses.push_back(address_of(
        *value.data,
        result,
        job.slice->home,
        is_sum ? job.accumulation : dtype));
  }
  return true;
}

bool CudaBackend::add(const Job& job) {
  Sum sum;
  if (!prepare(sum, job)) {
    return false;
  }
  Home& home = home_of(job.slice->home);
  if (job.is_norm) {
    home.norms.push_back(std::move(sum));
    return true;
  }
  SumJob& packed = sum.job;
  packed.values = sum.addresses.data();
  packed.stored = job.result->mutable_data_ptr();
  job.get_state(packed);
  if (has_norms(packed.step->rule)) {
    home.launches.add_with_norms(
        packed, numbers_for(home, Launches::num_numbers(packed)));
  } else {
    home.launches.add(packed);
  }
  return true;
}

// Memory for a rule with norms: few blocks for many keys.
double* CudaBackend::numbers_for(Home& home, int64_t count) {
  constexpr int64_t kBlock = 32768;
  if (home.num_left < count) {
    home.num_left = std::max(count, kBlock);
    staged_.push_back(runtime_.allocate(
        {home.num_left}, {1}, c10::kDouble, home.place.device));
    home.numbers = staged_.back().mutable_data_ptr<double>();
  }
  double* const numbers = home.numbers;
  home.numbers += count;
  home.num_left -= count;
  return numbers;
}

double CudaBackend::squared_norm(double scale) {
  order_.sync();
  std::vector<at::Tensor> squares; // of each home
  for (const auto& home : homes_) {
    order_.enter(home->place);
    int64_t count = 0;
    for (const auto& sum : home->norms) {
      count += Launches::num_squares(sum.job);
    }
    squares.push_back(
        runtime_.allocate({count}, {1}, c10::kDouble, home->place.device));
    auto* next = squares.back().mutable_data_ptr<double>();
    for (auto& sum : home->norms) {
      sum.job.values = sum.addresses.data();
      home->launches.add_norm(sum.job, scale, next);
      next += Launches::num_squares(sum.job);
    }
    kernels::cuda::check(home->launches.finish());
    const PlainDispatch plain;
    squares.back() = squares.back().sum();
  }
  double result = 0;
  for (size_t i = 0; i < homes_.size(); ++i) {
    order_.enter(homes_[i]->place);
    const PlainDispatch plain;
    result += squares[i].item<double>();
  }
  homes_.clear();
  staged_.clear();
  return result;
}

bool CudaBackend::add_copy(const Slice& source, const at::Tensor& out) {
  const bool is_known = source_ == &source;
  if ((!is_known && !has_kernels(source.value.device())) ||
      source.value.scalar_type() != out.scalar_type() ||
      !is_plain(out, source.value)) {
    return false;
  }
  if (!is_known) {
    flush_copy();
    source_ = &source;
  }
  order_.use(source.home, out.device());
  outs_.push_back(out.mutable_data_ptr());
  return true;
}

void CudaBackend::flush_copy() {
  if (!outs_.empty()) {
    home_of(source_->home)
        .launches.add_copy(
            source_->value.const_data_ptr(),
            outs_.data(),
            outs_.size(),
            static_cast<int64_t>(source_->value.nbytes()));
    outs_.clear();
  }
}

void CudaBackend::run() {
  flush_copy();
  order_.sync();
  for (const auto& home : homes_) {
    const c10::DeviceGuard guard(home->place.device);
    kernels::cuda::check(home->launches.finish());
  }
  homes_.clear();
  staged_.clear();
}

} // namespace torchkv

#include "send.h"

#include "../core/errors.h"
#include "../kernels/cuda/library.h"
#include "cuda_dtype.h"
#include "send_with_aten.h"

namespace torchkv {
namespace {

// Whether a kernel that computes in `dtype`, fp32 or fp64, reads such values.
bool is_read(c10::ScalarType value, c10::ScalarType dtype) {
  return cuda_dtype(value) && sum_type(value) == dtype;
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

SentSum sum_with_aten(
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype) {
  SentSum result;
  for (const auto& [value, residual, stream] : values) {
    Sent sent = send_with_aten(codec, value, residual, dtype, stream);
    result.sum = result.sum.defined() ? result.sum.add_(sent.sent)
                                      : std::move(sent.sent);
    result.residuals.push_back(std::move(sent.residual));
  }
  return result;
}

} // namespace

SentSum send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype) {
  if (codec.id == Codec::Id::kTopK || !place.device.is_cuda() ||
      !kernels::cuda::has_kernels(place.device)) {
    return sum_with_aten(codec, values, dtype);
  }
  Runtime& runtime = order.runtime();
  SentSum result;
  result.sum = runtime.allocate_like(values[0].value, dtype);
  kernels::cuda::Send call{};
  call.codec = codec.id;
  call.threshold = codec.threshold;
  call.num_elements = result.sum.numel();
  call.sum = result.sum.mutable_data_ptr();
  c10::SmallVector<at::Tensor, 4> converted; // until the launch
  const auto launch = [&] {
    call.is_aligned = is_aligned(call.sum);
    for (uint32_t k = 0; k < call.num_values; ++k) {
      const auto& sent = call.values[k];
      call.is_aligned = call.is_aligned && is_aligned(sent.values) &&
          is_aligned(sent.residual) && is_aligned(sent.kept);
    }
    kernels::cuda::check(
        kernels::cuda::table()->launch_send(
            call, order.stream(place).native_handle()));
    converted.clear();
    call.adds = true;
    call.num_values = 0;
  };
  for (const auto& [value, residual, stream] : values) {
    const at::Tensor read =
        is_read(value.scalar_type(), dtype) ? value : value.to(dtype);
    const auto known = cuda_dtype(read.scalar_type());
    TORCHKV_INTERNAL_ASSERT(known.has_value());
    const bool fits =
        call.num_values < kernels::cuda::kMaxSent && call.value == *known;
    if (call.num_values != 0 && !fits) {
      launch();
    }
    converted.push_back(read);
    call.value = *known;
    auto& sent = call.values[call.num_values++];
    sent = {};
    sent.values = read.const_data_ptr();
    sent.stream = stream;
    at::Tensor& kept = result.residuals.emplace_back();
    if (codec.has_feedback()) {
      kept = runtime.allocate_like(value, dtype);
      sent.residual = residual.const_data_ptr();
      sent.kept = kept.mutable_data_ptr();
    }
  }
  launch();
  return result;
}

} // namespace torchkv

#include "send.h"

#include "../core/errors.h"
#include "../kernels/cuda/code_chunk.h"
#include "../kernels/cuda/library.h"
#include "cuda_dtype.h"
#include "send_with_aten.h"

namespace torchkv {
namespace {

using kernels::cuda::is_aligned;

// Whether a kernel that computes in `dtype`, fp32 or fp64, reads such values.
bool is_read(c10::ScalarType value, c10::ScalarType dtype) {
  return cuda_dtype(value) && sum_type(value) == dtype;
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

// Finds what topk sends of the values of `send`, and points these to it. It is
// in the memory that is returned.
at::Tensor select_top(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    kernels::cuda::Send& send) {
  using kernels::cuda::TopState;
  constexpr int64_t kNumbers = sizeof(TopState) / sizeof(int64_t);
  at::Tensor memory = order.runtime().allocate(
      {send.num_values, kNumbers}, {kNumbers, 1}, c10::kLong, place.device);
  memory.zero_();
  kernels::cuda::SelectTop call{};
  call.value = send.value;
  call.is_aligned = true;
  call.num_values = send.num_values;
  call.num_elements = send.num_elements;
  call.num_sent = codec.num_sent(send.num_elements);
  auto* const states = static_cast<TopState*>(memory.mutable_data_ptr());
  for (uint32_t k = 0; k < send.num_values; ++k) {
    auto& sent = send.values[k];
    sent.top = states + k;
    call.values[k] = {sent.values, sent.residual, states + k};
    call.is_aligned =
        call.is_aligned && is_aligned(sent.values) && is_aligned(sent.residual);
  }
  kernels::cuda::check(
      kernels::cuda::table()->launch_select_top(
          call, order.stream(place).native_handle()));
  return memory;
}

// Launches the kernels that store the codes of each value or, without `codes`,
// the sum of what is sent. Returns the new residuals.
c10::SmallVector<at::Tensor, 4> launch(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype,
    const at::Tensor& sum,
    c10::ArrayRef<at::Tensor> codes) {
  Runtime& runtime = order.runtime();
  c10::SmallVector<at::Tensor, 4> residuals;
  kernels::cuda::Send call{};
  call.codec = codec.id;
  call.threshold = codec.threshold;
  call.num_elements = values[0].value.numel();
  call.packs = !codes.empty();
  call.sum = call.packs ? nullptr : sum.mutable_data_ptr();
  c10::SmallVector<at::Tensor, 4> converted; // until the launch
  const auto launch_kernel = [&] {
    call.is_aligned = is_aligned(call.sum);
    for (uint32_t k = 0; k < call.num_values; ++k) {
      const auto& sent = call.values[k];
      call.is_aligned = call.is_aligned && is_aligned(sent.values) &&
          is_aligned(sent.residual) && is_aligned(sent.kept);
    }
    at::Tensor top; // until the launch
    if (codec.id == Codec::Id::kTopK) {
      top = select_top(order, place, codec, call);
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
      launch_kernel();
    }
    converted.push_back(read);
    call.value = *known;
    auto& sent = call.values[call.num_values++];
    sent = {};
    sent.values = read.const_data_ptr();
    sent.stream = stream;
    if (call.packs) {
      sent.codes = codes[residuals.size()].mutable_data_ptr();
    }
    at::Tensor& kept = residuals.emplace_back();
    if (codec.has_feedback()) {
      kept = runtime.allocate_like(value, dtype);
      sent.residual = residual.const_data_ptr();
      sent.kept = kept.mutable_data_ptr();
    }
  }
  launch_kernel();
  return residuals;
}

} // namespace

SentSum send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype) {
  if (!kernels::cuda::has_kernels(place.device)) {
    return sum_with_aten(codec, values, dtype);
  }
  SentSum result;
  result.sum = order.runtime().allocate_like(values[0].value, dtype);
  result.residuals = launch(order, place, codec, values, dtype, result.sum, {});
  return result;
}

bool has_codes(const Codec& codec, c10::Device from, c10::Device to) {
  return codec.id != Codec::Id::kTopK && kernels::cuda::has_kernels(from) &&
      kernels::cuda::has_kernels(to);
}

SentCodes send_codes(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype) {
  const int64_t num_bytes = kernels::cuda::bytes_of_codes(
      codec.id,
      static_cast<int64_t>(c10::elementSize(dtype)),
      values[0].value.numel());
  SentCodes result;
  for (size_t i = 0; i < values.size(); ++i) {
    result.codes.push_back(
        order.runtime().allocate({num_bytes}, {1}, c10::kByte, place.device));
  }
  result.residuals =
      launch(order, place, codec, values, dtype, {}, result.codes);
  return result;
}

} // namespace torchkv

#include "send.h"

#include "../core/errors.h"
#include "../kernels/cuda/library.h"
#include "cuda_dtype.h"

namespace torchkv {
namespace {

// Whether a kernel that computes in `dtype`, fp32 or fp64, reads such values.
bool is_read(c10::ScalarType value, c10::ScalarType dtype) {
  return cuda_dtype(value) && sum_type(value) == dtype;
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

} // namespace

Sent send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype,
    uint64_t stream) {
  if (codec.id == Codec::Id::kTopK || !place.device.is_cuda() ||
      !kernels::cuda::has_kernels(place.device)) {
    return send_with_aten(codec, value, residual, dtype, stream);
  }
  const at::Tensor read =
      is_read(value.scalar_type(), dtype) ? value : value.to(dtype);
  const auto known = cuda_dtype(read.scalar_type());
  TORCHKV_INTERNAL_ASSERT(known.has_value());
  Sent result;
  result.sent = order.runtime().allocate_like(read, dtype);
  kernels::cuda::Send call{};
  call.value = *known;
  call.codec = codec.id;
  call.threshold = codec.threshold;
  call.stream = stream;
  call.num_elements = value.numel();
  call.values = read.const_data_ptr();
  call.sent = result.sent.mutable_data_ptr();
  if (codec.has_feedback()) {
    result.residual = order.runtime().allocate_like(read, dtype);
    call.residual = residual.const_data_ptr();
    call.kept = result.residual.mutable_data_ptr();
  }
  call.is_aligned = is_aligned(call.values) && is_aligned(call.residual) &&
      is_aligned(call.kept) && is_aligned(call.sent);
  kernels::cuda::check(
      kernels::cuda::table()->launch_send(
          call, order.stream(place).native_handle()));
  return result;
}

} // namespace torchkv

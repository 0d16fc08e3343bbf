#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

#include "../core/codec.h"
#include "../device/stream_order.h"

namespace torchkv {

// A value that a codec sends, its residual (undefined for a codec without error
// feedback), and the stream of int4's random numbers.
struct ToSend {
  at::Tensor value;
  at::Tensor residual;
  uint64_t stream = 0;
};

// The sum of what is sent, left to right, and the new residuals.
struct SentSum {
  at::Tensor sum;
  c10::SmallVector<at::Tensor, 4> residuals; // undefined without feedback
};

// What a codec sends of a key's values, all on the device of `place`, which has
// been entered; the tensors are those of send_with_aten. One kernel sends and
// adds up, after those that select for topk; on a device without kernels,
// PyTorch's operators do. REQUIRES: PlainDispatch; at least one value, of at
// least one element.
SentSum send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype);

// The codes of what is sent of each value, the payloads of DeviceCodes, and the
// new residuals.
struct SentCodes {
  c10::SmallVector<at::Tensor, 4> codes;
  c10::SmallVector<at::Tensor, 4> residuals; // undefined without feedback
};

// Whether there are kernels that send codes from and to these devices.
bool has_codes(const Codec& codec, c10::Device from, c10::Device to);

// As send(). REQUIRES: has_codes() from the device of `place`.
SentCodes send_codes(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype);

} // namespace torchkv

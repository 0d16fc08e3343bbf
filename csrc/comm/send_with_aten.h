#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "../core/codec.h"

namespace torchkv {

// What a codec sends, and what it keeps for the next value.
struct Sent {
  at::Tensor sent;
  at::Tensor residual; // undefined for a codec without error feedback
};

// What a codec sends of a value plus residual, and what it leaves, by ATen
// operators, on devices without kernels: the formulas of kernels/codecs.h on
// whole tensors, with the same bits. The value: the elements of a whole value
// in the order of its memory, one-dimensional. Results are new, of `dtype`,
// fp32 or fp64, which the residual has, too; it is undefined for a codec
// without error feedback. `stream`: of int4's random numbers. Does not block
// the host. REQUIRES: PlainDispatch; at least one element.
Sent send_with_aten(
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype,
    uint64_t stream);

} // namespace torchkv

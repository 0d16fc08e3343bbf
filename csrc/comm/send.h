#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "../core/codec.h"
#include "../device/stream_order.h"
#include "send_with_aten.h"

namespace torchkv {

// send_with_aten on the device of `place`, which has been entered, and where
// the value is: in one pass by a kernel where there is one for the codec.
Sent send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype,
    uint64_t stream);

} // namespace torchkv

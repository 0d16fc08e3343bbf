#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "../core/codec.h"
#include "../device/stream_order.h"
#include "send_with_aten.h"

namespace torchkv {

// What a codec sends of a value on the device of `place`, which has been
// entered: as send_with_aten, but by one kernel where there is one for the
// codec. REQUIRES: PlainDispatch; at least one element.
Sent send(
    StreamOrder& order,
    const Place& place,
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype,
    uint64_t stream);

} // namespace torchkv

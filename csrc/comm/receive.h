#pragma once

#include <ATen/core/Tensor.h>

#include "../device/stream_order.h"
#include "backend.h"

namespace torchkv {

// Whether a job's values are codes on CUDA devices (DeviceCodes) and dense
// ones, which kernels on its home add up in the accumulation type.
bool is_received(const Job& job);

// Their sum, left to right. The part of each value's codes that the job needs
// is copied to its home. REQUIRES: is_received(); the home has been entered.
at::Tensor receive(StreamOrder& order, const Job& job);

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "history.h"

// CPU tensors that copies with `non_blocking` have left in use by a stream, as
// if they were pinned. Every operator on the CPU that touches one is checked,
// and mistakes are noted; code that goes through raw pointers is not seen.
namespace torchkv::mock_cuda {

// A copy on `stream` touches `tensor`. Throws c10::Error where another access
// is not ordered with it. REQUIRES: mutex()
void access_host(
    const WorkPtr& work,
    c10::Stream stream,
    const at::Tensor& tensor,
    bool is_write);

// Lets go of tensors that all streams are done with, whatever the host knows.
void forget_host_memory();

} // namespace torchkv::mock_cuda

#pragma once

#include "kernels/cuda/params.h"

namespace torchkv::mock_cuda {

// The kernels for the fake devices: each launch is checked as one work of its
// stream on the memory of its keys, and executed by the emulated table.
const kernels::cuda::Table& table();

} // namespace torchkv::mock_cuda

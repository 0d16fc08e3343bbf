#pragma once

#include "kernels/cuda/params.h"

namespace torchkv::mock_cuda {

// The kernels for the fake devices: each launch is checked as one work of its
// stream that touches the memory of its keys, and is carried out by the
// emulated table. Every device has a few multiprocessors.
const kernels::cuda::Table& table();

} // namespace torchkv::mock_cuda

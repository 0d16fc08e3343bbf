#pragma once

#include "comm/nccl.h"

namespace torchkv::mock_cuda {

// NCCL for the fake devices. An operation is one work of each rank's stream;
// what a rank receives is ordered after all its sources. Fails if ranks of a
// clique differ in their order of operations, a device is not the
// communicator's, or a rank's buffers overlap other than in place.
const nccl::Functions& nccl_functions();

// Operations since the start, each counted once.
int num_nccl_operations();

} // namespace torchkv::mock_cuda

#pragma once

#include "comm/nccl_library.h"

namespace torchkv::mock_cuda {

// NCCL for the fake devices. An operation is one work of each rank's stream;
// what a rank receives is ordered after all that it comes from. Fails where
// ranks of a clique do not take part in one order, a device takes part that is
// not the communicator's, or what a rank scatters or gathers overlaps what it
// receives other than in place.
const nccl::Functions& nccl_functions();

// Operations since the start, each counted once.
int num_nccl_operations();

} // namespace torchkv::mock_cuda

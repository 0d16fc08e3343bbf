#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/cuda/params.h"

namespace torchkv::testing {

struct EmulatedLaunch {
  bool is_copy;
  kernels::cuda::Variant variant;
  kernels::cuda::ParamsHead head;
  size_t params_bytes;
  std::vector<int> alignments; // of the keys
};

// The CUDA kernels on the memory of the host: a launch runs the code of every
// thread of every block, the last ones first, and is done when it returns. What
// a GPU would trap, such as a pointer that is not aligned, fails the test.
const kernels::cuda::Table& emulated_table(
    size_t params_bytes = kernels::cuda::kLargeParams);

// What was launched since this was cleared.
std::vector<EmulatedLaunch>& emulated_launches();

// What the next launches return.
int& emulated_error();

} // namespace torchkv::testing

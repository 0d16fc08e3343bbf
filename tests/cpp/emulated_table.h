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

// The CUDA kernels on host memory: a launch runs the code of every thread of
// every block, in reverse order, and blocks until done. Whatever traps on a
// GPU, such as a misaligned pointer, fails the test.
const kernels::cuda::Table& emulated_table(
    size_t params_bytes = kernels::cuda::kLargeParams);

// The launches since this was last cleared.
std::vector<EmulatedLaunch>& emulated_launches();

// The error that launches return.
int& emulated_error();

} // namespace torchkv::testing

#pragma once

#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <functional>

#include "devices.h"
#include "memory.h"

// The mock's interface for tests.
namespace torchkv::mock_cuda {

// Fresh devices; see reset_devices. Throws c10::Error if a tensor on one is
// still alive, or was freed in use.
void reset(int num_devices, Topology topology = Topology::kAll);

struct Range {
  const void* begin;
  size_t num_bytes;
  bool is_write;
};

// A launch of a kernel as CUDA sees it: on the current device, on a
// cudaStream_t of it, with pointers to its memory and that of peers. `run`
// executes it, now or in each replay of the graph that captures it.
void launch(
    const char* kernel,
    void* native_stream,
    c10::ArrayRef<Range> ranges,
    const std::function<void()>& run);

} // namespace torchkv::mock_cuda

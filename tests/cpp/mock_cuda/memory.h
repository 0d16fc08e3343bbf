#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/util/FunctionRef.h>

#include <cstddef>

#include "history.h"

// Memory of the fake devices: host memory in blocks that record their accesses
// and are freed as by the caching allocator: the next allocation of the same
// size on the same stream reuses a block.
namespace torchkv::mock_cuda {

// c10's allocator of DeviceType::CUDA: for the current stream of the current
// device. Fills allocated and freed memory with NaN.
c10::Allocator& allocator();

// REQUIRES for all below: mutex().

// `work`, on `stream`, touches device memory, of its own device or a peer's.
// Throws c10::Error for an invalid access, and as check().
enum class Reach : uint8_t { kPeers, kAll /* a copy engine's */ };
void access(
    const WorkPtr& work,
    c10::Stream stream,
    const void* begin,
    size_t num_bytes,
    bool is_write,
    Reach reach = Reach::kPeers);
// All byte ranges of a tensor's elements.
void access(
    const WorkPtr& work,
    c10::Stream stream,
    const at::Tensor& tensor,
    bool is_write,
    Reach reach = Reach::kPeers);

// As the caching allocator's recordStream.
void keep_until_done(const void* data, c10::Stream stream);

// Frees memory that was allocated in a capture, unless a tensor still owns it.
// As by cudaFree: once it is no longer used.
void release(void* data);

int64_t num_live_blocks();
// Gives all blocks back to the system. REQUIRES: none is live.
void forget_blocks();

// Calls `visit` with each run of bytes that the elements of a tensor take.
void for_each_run(
    const at::Tensor& tensor,
    c10::function_ref<void(const char* begin, size_t num_bytes)> visit);

} // namespace torchkv::mock_cuda

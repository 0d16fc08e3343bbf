#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <map>

#include "history.h"

// CPU tensors that copies with `non_blocking` have left in use by a stream, as
// if they were pinned. Every operator on the CPU that touches one is checked,
// and errors are noted; accesses by raw pointers are not seen.
namespace torchkv::mock_cuda {

// A copy on `stream` touches `tensor`. Throws c10::Error if another access is
// not ordered with it. REQUIRES: mutex()
void access_host(
    const WorkPtr& work,
    c10::Stream stream,
    const at::Tensor& tensor,
    bool is_write);

// As cudaHostRegister and cudaHostUnregister. False if a page of it is pinned
// already, or if no memory begins there that is pinned.
bool pin_host_memory(const void* data, size_t num_bytes);
bool unpin_host_memory(const void* data);
// Of the memory that is pinned: begin -> bytes.
std::map<const void*, size_t> pinned_host_memory();

// Releases tensors that all streams have finished with.
void forget_host_memory();

} // namespace torchkv::mock_cuda

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "../../core/export.h"
#include "params.h"

// The door to libtorchkv_cuda, which holds the kernels. It lies beside
// libtorchkv and is loaded when the first CUDA tensor comes; where torchkv was
// built without it, there are no kernels, and PyTorch's operators do the work.
// Any thread may call anything here.
namespace torchkv::kernels::cuda {

// Null where there are no kernels. RuntimeError where there is a library that
// cannot be loaded or is of another torchkv.
TORCHKV_API const Table* table();

// For tests: takes the place of the library's table, from now on; null says
// that there are no kernels.
TORCHKV_API void set_table(const Table* table);

// Whether there are kernels for the CUDA device: there is a table, and it was
// compiled for that device, which is asked for once. A GPU that is older than
// all architectures of the build has none, as if there were no table.
TORCHKV_API bool has_kernels(c10::Device device);

// Of the device; at least 1. REQUIRES: has_kernels(device).
int num_multiprocessors(c10::Device device);

// Whether work on the CUDA stream goes into a graph. Makes no context on
// another device than the stream's.
TORCHKV_API bool is_capturing(c10::Stream stream);

// RuntimeError with CUDA's words where `error` is not cudaSuccess.
void check(int error);

} // namespace torchkv::kernels::cuda

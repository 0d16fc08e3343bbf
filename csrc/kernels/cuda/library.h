#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>

#include "../../core/export.h"
#include "params.h"

// Loads libtorchkv_cuda, which contains the kernels, from the folder of
// libtorchkv on the first use of a CUDA tensor. If torchkv was built without
// it, PyTorch's operators are used instead. All functions are thread-safe.
namespace torchkv::kernels::cuda {

// Null if there are no kernels, or none for this driver, with a warning.
// RuntimeError if the library exists but cannot be loaded or belongs to another
// build of torchkv.
TORCHKV_API const Table* table();

// For tests: replaces the library's table from now on; null means no kernels.
TORCHKV_API void set_table(const Table* table);

// Whether there are kernels for the device: false for other devices than GPUs,
// without a table and for a GPU older than all architectures of the build. The
// answer is cached.
TORCHKV_API bool has_kernels(c10::Device device);

// Whether the CUDA stream is being captured into a graph. Creates no context on
// devices other than the stream's.
TORCHKV_API bool is_capturing(c10::Stream stream);

// While it lives, the calling thread may pin memory and wait for events
// although another thread captures a graph, in PyTorch's default mode: else
// that would fail, and the capture, too. For what a store does on its own
// threads, or when memory is freed, at a time that the capturing thread does
// not choose. Does nothing where CUDA is not in use.
class TORCHKV_API BesideCaptures {
 public:
  BesideCaptures();
  ~BesideCaptures();
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const int before_; // mode
};

// Whether kernels may access the memory by words (types.h); null counts as
// such.
inline bool is_aligned(const void* memory) {
  return reinterpret_cast<uintptr_t>(memory) % 16 == 0;
}

// RuntimeError with CUDA's message unless `error` is cudaSuccess.
void check(int error);

} // namespace torchkv::kernels::cuda

#pragma once

#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include <cstddef>
#include <mutex>
#include <string>
#include <vector>

#include "../core/export.h"

namespace torchkv::nccl {

// The part of NCCL's C API in use: types of nccl.h, which CUDA builds of
// PyTorch do not ship, and functions of the library, which they do.
// https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html
using Comm = struct ncclComm*;
using Result = int; // 0 = ncclSuccess
using Stream = void*; // cudaStream_t

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum Op : int { kSum = 0 };

struct Functions {
  const char* (*get_error_string)(Result result);
  Result (*comm_init_all)(Comm* comms, int num_devices, const int* devices);
  Result (*group_start)();
  Result (*group_end)();
  Result (*reduce)(
      const void* send,
      void* receive,
      size_t count,
      DataType dtype,
      Op op,
      int root,
      Comm comm,
      Stream stream);
  Result (*broadcast)(
      const void* send,
      void* receive,
      size_t count,
      DataType dtype,
      int root,
      Comm comm,
      Stream stream);
  // The rank receives its part of the sum of what all send: ranks * count.
  Result (*reduce_scatter)(
      const void* send,
      void* receive,
      size_t receive_count,
      DataType dtype,
      Op op,
      Comm comm,
      Stream stream);
  // Each rank receives what all send, one after another: ranks * count.
  Result (*all_gather)(
      const void* send,
      void* receive,
      size_t send_count,
      DataType dtype,
      Comm comm,
      Stream stream);
};

// Of the libnccl.so.2 that is loaded already, as PyTorch's CUDA builds do when
// they are imported; null where none is. Loads no other one: two copies of NCCL
// in a process conflict.
TORCHKV_API const Functions* functions();

// For tests: replaces the library.
TORCHKV_API void set_functions(const Functions* functions);

// "NCCL: ncclGroupEnd failed: unhandled cuda error"
std::string describe(const char* what, Result result);

// One communicator for each device of a list in ascending order, without
// repeats. Created on first use, which takes seconds, and never destroyed: it
// must not outlive the CUDA driver. RuntimeError if NCCL has failed on such a
// list before. Any thread.
TORCHKV_API c10::ArrayRef<Comm> clique(const std::vector<int>& devices);

// Marks communicators as unusable after an operation has failed, because their
// ranks may disagree. `problem` is NCCL's message.
TORCHKV_API void give_up(
    const std::vector<int>& devices,
    const std::string& problem);

// Groups of several threads must not mix: the order of operations must be the
// same on all devices of a clique. Held while a group is enqueued.
std::mutex& group_mutex();

} // namespace torchkv::nccl

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "../core/export.h"
#include "../device/runtime.h"

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

// One communicator for each device of a list in ascending order, without
// repeats. Created on first use, which takes seconds, and never destroyed: it
// must not outlive the CUDA driver. RuntimeError if NCCL has failed on such a
// list before. Any thread.
TORCHKV_API c10::ArrayRef<Comm> clique(const std::vector<int>& devices);

// Elements as NCCL counts them.
struct Numbers {
  DataType dtype;
  int64_t count;
};

// A tensor's elements for NCCL; nothing for dtypes that it cannot sum.
std::optional<Numbers> numbers_of(const at::Tensor& tensor);

// The operations of one call, enqueued together by run() on the current stream
// of each device. After an operation has failed, the communicators of the call
// are unusable, because their ranks may disagree.
class Group {
 public:
  explicit Group(Runtime& runtime) : runtime_(runtime) {}

  enum class Kind : uint8_t { kReduce, kBroadcast, kReduceScatter, kAllGather };

  // One device's buffers in an operation.
  struct Rank {
    c10::Device device;
    const void* send;
    void* receive;
  };
  using Ranks = c10::SmallVector<Rank, 8>;

  // For reduce-scatter and all-gather, `numbers` are those of one rank, and
  // `root` is ignored. RuntimeError while a stream of a rank is captured into a
  // CUDA graph: the graph would have to include all devices or none, and an
  // error leaves NCCL's communicators unusable. REQUIRES: one rank for each
  // device, one of them `root`.
  void add(Kind kind, Ranks ranks, c10::Device root, Numbers numbers);

  void run();

 private:
  struct Operation {
    Kind kind;
    Rank rank;
    int root;
    Numbers numbers;
    Comm comm;
  };
  void check(const char* what, Result result);
  Result enqueue(const Functions& functions, const Operation& operation);

  Runtime& runtime_;
  std::vector<Operation> operations_;
  std::vector<std::vector<int>> cliques_; // of the operations: their devices
};

} // namespace torchkv::nccl

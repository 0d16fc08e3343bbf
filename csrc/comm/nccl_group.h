#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "../device/runtime.h"
#include "nccl_library.h"

namespace torchkv::nccl {

// Elements as NCCL counts them.
struct Numbers {
  DataType dtype;
  int64_t count;
};

// A tensor's elements for NCCL; nothing for dtypes that it cannot sum.
std::optional<Numbers> numbers_of(const at::Tensor& tensor);

// The operations of one call, enqueued together by run() on the current stream
// of each device.
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

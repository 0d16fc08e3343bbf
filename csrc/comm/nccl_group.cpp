#include "nccl_group.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "../core/errors.h"

namespace torchkv::nccl {

std::optional<Numbers> numbers_of(const at::Tensor& tensor) {
  const int64_t count = tensor.numel() * (tensor.is_complex() ? 2 : 1);
  switch (c10::toRealValueType(tensor.scalar_type())) {
    case c10::kFloat:
      return Numbers{kFloat32, count};
    case c10::kDouble:
      return Numbers{kFloat64, count};
    case c10::kHalf:
      return Numbers{kFloat16, count};
    case c10::kBFloat16:
      return Numbers{kBfloat16, count};
    case c10::kChar:
      return Numbers{kInt8, count};
    case c10::kByte:
      return Numbers{kUint8, count};
    case c10::kInt:
      return Numbers{kInt32, count};
    case c10::kUInt32:
      return Numbers{kUint32, count};
    case c10::kLong:
      return Numbers{kInt64, count};
    case c10::kUInt64:
      return Numbers{kUint64, count};
    default:
      return std::nullopt;
  }
}

void Group::add(Kind kind, Ranks ranks, c10::Device root, Numbers numbers) {
  std::sort(ranks.begin(), ranks.end(), [](const Rank& a, const Rank& b) {
    return a.device.index() < b.device.index();
  });
  std::vector<int> devices;
  int root_rank = 0;
  for (const auto& rank : ranks) {
    TORCH_CHECK(
        !runtime_.is_capturing(runtime_.current_stream(rank.device)),
        "unexpected CUDA graph capture on the current stream of ",
        rank.device,
        ": the type 'nccl' does not support it with several devices; use the "
        "type 'device'");
    if (rank.device == root) {
      root_rank = static_cast<int>(devices.size());
    }
    devices.push_back(rank.device.index());
  }
  const auto comms = clique(devices);
  for (size_t i = 0; i < ranks.size(); ++i) {
    operations_.push_back({kind, ranks[i], root_rank, numbers, comms[i]});
  }
  if (std::find(cliques_.begin(), cliques_.end(), devices) == cliques_.end()) {
    cliques_.push_back(std::move(devices));
  }
}

void Group::run() {
  if (operations_.empty()) {
    return;
  }
  const Functions& functions = *nccl::functions();
  const std::lock_guard lock(group_mutex());
  check("ncclGroupStart", functions.group_start());
  Result first = 0;
  for (const auto& operation : operations_) {
    const Result result = enqueue(functions, operation);
    first = first == 0 ? result : first;
  }
  const Result end = functions.group_end();
  check("an operation", first);
  check("ncclGroupEnd", end);
  operations_.clear();
}

void Group::check(const char* what, Result result) {
  if (result == 0) {
    return;
  }
  const std::string problem = describe(what, result);
  for (const auto& devices : cliques_) {
    give_up(devices, problem);
  }
  TORCH_CHECK(false, problem);
}

Result Group::enqueue(const Functions& functions, const Operation& operation) {
  const auto& [device, send, receive] = operation.rank;
  const auto& [dtype, number] = operation.numbers;
  const auto count = static_cast<size_t>(number);
  const int root = operation.root;
  const Comm comm = operation.comm;
  void* const stream = runtime_.current_stream(device).native_handle();
  switch (operation.kind) {
    case Kind::kReduce:
      return functions.reduce(
          send, receive, count, dtype, kSum, root, comm, stream);
    case Kind::kBroadcast:
      return functions.broadcast(
          send, receive, count, dtype, root, comm, stream);
    case Kind::kReduceScatter:
      return functions.reduce_scatter(
          send, receive, count, dtype, kSum, comm, stream);
    case Kind::kAllGather:
      return functions.all_gather(send, receive, count, dtype, comm, stream);
  }
  TORCHKV_INTERNAL_ASSERT(false);
}

} // namespace torchkv::nccl

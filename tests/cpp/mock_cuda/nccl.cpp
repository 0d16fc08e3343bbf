#include "nccl.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <atomic>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <vector>

#include "devices.h"
#include "memory.h"

// What a communicator is: a rank of a clique.
struct torchkv::nccl::ncclComm {
  int clique;
  int rank;
  int num_ranks;
  c10::DeviceIndex device;
};

namespace torchkv::mock_cuda {
namespace {

constexpr nccl::Result kInvalidUsage = 5;

struct Part {
  bool is_reduce;
  const void* send;
  void* receive;
  size_t count;
  nccl::DataType dtype;
  int root;
  nccl::Comm comm;
  void* stream;
};

// The group that the calling thread has open.
thread_local std::vector<Part> group;
thread_local int depth = 0;
std::atomic<int> num_operations{0};

c10::ScalarType scalar_type(nccl::DataType dtype) {
  switch (dtype) {
    case nccl::kInt8:
      return at::kChar;
    case nccl::kUint8:
      return at::kByte;
    case nccl::kInt32:
    case nccl::kUint32: // the same sums
      return at::kInt;
    case nccl::kInt64:
    case nccl::kUint64:
      return at::kLong;
    case nccl::kFloat16:
      return at::kHalf;
    case nccl::kFloat32:
      return at::kFloat;
    case nccl::kFloat64:
      return at::kDouble;
    case nccl::kBfloat16:
      return at::kBFloat16;
  }
  TORCH_CHECK(false, "mock_cuda: no dtype of NCCL");
}

c10::Stream stream_of(const Part& part) {
  const c10::Device device(c10::kCUDA, part.comm->device);
  // The default stream is null, whatever the device.
  return part.stream == nullptr ? c10::Stream(c10::Stream::DEFAULT, device)
                                : mock_cuda::stream_of(part.stream);
}

// `later` goes on after what `earlier` holds now.
void order(c10::Stream earlier, c10::Stream later) {
  c10::Event event(c10::kCUDA);
  event.record(earlier);
  event.block(later);
}

void run_reduce(const std::vector<Part>& ranks, size_t bytes) {
  const Part& root = ranks.at(static_cast<size_t>(ranks[0].root));
  const auto options = at::dtype(scalar_type(root.dtype));
  const auto count = static_cast<int64_t>(root.count);
  at::Tensor sum;
  for (const auto& part : ranks) {
    const auto stream = stream_of(part);
    access(
        enqueue(stream, "ncclReduce"),
        stream,
        part.send,
        bytes,
        /*is_write=*/false);
    const at::Tensor sent =
        at::from_blob(const_cast<void*>(part.send), {count}, options);
    sum = sum.defined() ? sum.add(sent) : sent.clone();
    if (part.comm != root.comm) {
      order(stream, stream_of(root));
    }
  }
  const auto stream = stream_of(root);
  access(
      enqueue(stream, "ncclReduce"),
      stream,
      root.receive,
      bytes,
      /*is_write=*/true);
  at::from_blob(root.receive, {count}, options).copy_(sum);
}

void run_broadcast(const std::vector<Part>& ranks, size_t bytes) {
  const Part& root = ranks.at(static_cast<size_t>(ranks[0].root));
  const auto from = stream_of(root);
  access(
      enqueue(from, "ncclBroadcast"),
      from,
      root.send,
      bytes,
      /*is_write=*/false);
  for (const auto& part : ranks) {
    const auto to = stream_of(part);
    if (part.comm != root.comm) {
      order(from, to);
    }
    if (part.receive != root.send) {
      access(
          enqueue(to, "ncclBroadcast"),
          to,
          part.receive,
          bytes,
          /*is_write=*/true);
      std::memcpy(part.receive, root.send, bytes);
    }
    if (part.comm != root.comm) {
      order(to, from); // the root's kernel ends when all have what it sends
    }
  }
}

nccl::Result run_group() {
  const std::lock_guard lock(mutex());
  // Of each clique, operation by operation.
  std::map<int, std::map<int, std::list<Part>>> cliques;
  for (const auto& part : group) {
    cliques[part.comm->clique][part.comm->rank].push_back(part);
  }
  group.clear();
  for (auto& [clique, ranks] : cliques) {
    const size_t count = ranks.begin()->second.size();
    for (size_t i = 0; i < count; ++i) {
      std::vector<Part> parts;
      for (auto& [rank, queue] : ranks) {
        if (queue.size() != count - i) {
          return kInvalidUsage;
        }
        parts.push_back(queue.front());
        queue.pop_front();
        const Part& first = parts[0];
        const Part& last = parts.back();
        if (last.is_reduce != first.is_reduce || last.root != first.root ||
            last.count != first.count || last.dtype != first.dtype ||
            stream_of(last).device().index() != last.comm->device) {
          return kInvalidUsage;
        }
      }
      if (parts.size() != static_cast<size_t>(parts[0].comm->num_ranks)) {
        return kInvalidUsage;
      }
      const size_t bytes =
          parts[0].count * c10::elementSize(scalar_type(parts[0].dtype));
      ++num_operations;
      if (parts[0].is_reduce) {
        run_reduce(parts, bytes);
      } else {
        run_broadcast(parts, bytes);
      }
    }
  }
  return 0;
}

nccl::Result add(const Part& part) {
  if (depth == 0) {
    return kInvalidUsage; // alone, it would wait for the others for ever
  }
  group.push_back(part);
  return 0;
}

} // namespace

const nccl::Functions& nccl_functions() {
  static nccl::Functions functions{};
  functions.get_error_string = [](nccl::Result) -> const char* {
    return "invalid usage";
  };
  functions.comm_init_all =
      [](nccl::Comm* comms, int num_devices, const int* devices) {
        static std::atomic<int> num_cliques{0};
        const int clique = num_cliques++;
        for (int rank = 0; rank < num_devices; ++rank) {
          for (int other = 0; other < rank; ++other) {
            if (devices[rank] == devices[other]) {
              return kInvalidUsage;
            }
          }
          // For the life of the process, as the store's cliques are.
          comms[rank] = new nccl::ncclComm{
              clique,
              rank,
              num_devices,
              static_cast<c10::DeviceIndex>(devices[rank])};
        }
        return 0;
      };
  functions.group_start = [] {
    ++depth;
    return 0;
  };
  functions.group_end = [] { return --depth == 0 ? run_group() : 0; };
  functions.reduce = [](const void* send,
                        void* receive,
                        size_t count,
                        nccl::DataType dtype,
                        nccl::Op /*op*/,
                        int root,
                        nccl::Comm comm,
                        nccl::Stream stream) {
    return add({true, send, receive, count, dtype, root, comm, stream});
  };
  functions.broadcast = [](const void* send,
                           void* receive,
                           size_t count,
                           nccl::DataType dtype,
                           int root,
                           nccl::Comm comm,
                           nccl::Stream stream) {
    return add({false, send, receive, count, dtype, root, comm, stream});
  };
  return functions;
}

int num_nccl_operations() {
  return num_operations;
}

} // namespace torchkv::mock_cuda

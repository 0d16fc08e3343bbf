#include "nccl.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "devices.h"
#include "memory.h"

// A communicator: a rank of a clique.
struct torchkv::nccl::ncclComm {
  int clique;
  int rank;
  int num_ranks;
  c10::DeviceIndex device;
};

namespace torchkv::mock_cuda {
namespace {

constexpr nccl::Result kInvalidUsage = 5;

enum class Kind : uint8_t { kReduce, kBroadcast, kReduceScatter, kAllGather };

struct Part {
  Kind kind;
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
std::set<int> unusable_cliques; // guarded by mutex()

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

// Makes `later` wait for the work on `earlier`.
void order(c10::Stream earlier, c10::Stream later) {
  c10::Event event(c10::kCUDA);
  event.record(earlier);
  event.block(later);
}

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kReduce:
      return "ncclReduce";
    case Kind::kBroadcast:
      return "ncclBroadcast";
    case Kind::kReduceScatter:
      return "ncclReduceScatter";
    case Kind::kAllGather:
      return "ncclAllGather";
  }
  TORCH_CHECK(false, "mock_cuda: no operation of NCCL");
}

size_t bytes_of(const Part& part) {
  return part.count * c10::elementSize(scalar_type(part.dtype));
}

at::Tensor numbers(const void* data, size_t count, nccl::DataType dtype) {
  return at::from_blob(
      const_cast<void*>(data),
      {static_cast<int64_t>(count)},
      at::dtype(scalar_type(dtype)));
}

// What the rank sends: `times` its count.
at::Tensor read(const Part& part, size_t times = 1) {
  const auto stream = stream_of(part);
  access(
      enqueue(stream, name_of(part.kind)),
      stream,
      part.send,
      times * bytes_of(part),
      /*is_write=*/false);
  return numbers(part.send, times * part.count, part.dtype);
}

// What the rank receives.
void write(const Part& part, const at::Tensor& received) {
  const auto stream = stream_of(part);
  access(
      enqueue(stream, name_of(part.kind)),
      stream,
      part.receive,
      received.nbytes(),
      /*is_write=*/true);
  numbers(part.receive, static_cast<size_t>(received.numel()), part.dtype)
      .copy_(received);
}

void add_to(at::Tensor& sum, const at::Tensor& sent) {
  sum = sum.defined() ? sum.add(sent) : sent.clone();
}

void run_reduce(const std::vector<Part>& ranks) {
  const Part& root = ranks.at(static_cast<size_t>(ranks[0].root));
  at::Tensor sum;
  for (const auto& part : ranks) {
    add_to(sum, read(part));
    if (part.comm != root.comm) {
      order(stream_of(part), stream_of(root));
    }
  }
  write(root, sum);
}

void run_broadcast(const std::vector<Part>& ranks) {
  const Part& root = ranks.at(static_cast<size_t>(ranks[0].root));
  const auto from = stream_of(root);
  const at::Tensor sent = read(root);
  for (const auto& part : ranks) {
    const auto to = stream_of(part);
    if (part.comm != root.comm) {
      order(from, to);
    }
    if (part.receive != root.send) {
      write(part, sent);
    }
    if (part.comm != root.comm) {
      order(to, from); // the root's kernel ends when all have what it sends
    }
  }
}

// All that is received comes after all that is sent.
void order_all(const std::vector<Part>& ranks) {
  for (const auto& earlier : ranks) {
    for (const auto& later : ranks) {
      if (earlier.comm != later.comm) {
        order(stream_of(earlier), stream_of(later));
      }
    }
  }
}

void run_reduce_scatter(const std::vector<Part>& ranks) {
  at::Tensor sum;
  for (const auto& part : ranks) {
    add_to(sum, read(part, ranks.size()));
  }
  order_all(ranks);
  const auto count = static_cast<int64_t>(ranks[0].count);
  for (const auto& part : ranks) {
    write(part, sum.narrow(0, part.comm->rank * count, count));
  }
}

void run_all_gather(const std::vector<Part>& ranks) {
  std::vector<at::Tensor> sent;
  for (const auto& part : ranks) {
    sent.push_back(read(part));
  }
  order_all(ranks);
  const at::Tensor all = at::cat(sent);
  for (const auto& part : ranks) {
    write(part, all);
  }
}

void run(const std::vector<Part>& ranks) {
  ++num_operations;
  switch (ranks[0].kind) {
    case Kind::kReduce:
      return run_reduce(ranks);
    case Kind::kBroadcast:
      return run_broadcast(ranks);
    case Kind::kReduceScatter:
      return run_reduce_scatter(ranks);
    case Kind::kAllGather:
      return run_all_gather(ranks);
  }
}

// One of a rank's send and receive buffers has the numbers of all ranks, the
// other those of one: disjoint in memory, or the latter at this rank's offset
// in the former.
bool are_apart_or_in_place(const Part& part) {
  if (part.kind == Kind::kReduce || part.kind == Kind::kBroadcast) {
    return true;
  }
  const auto send = reinterpret_cast<uintptr_t>(part.send);
  const auto receive = reinterpret_cast<uintptr_t>(part.receive);
  const bool sends_all = part.kind == Kind::kReduceScatter;
  const uintptr_t all = sends_all ? send : receive;
  const uintptr_t one = sends_all ? receive : send;
  const uintptr_t bytes = bytes_of(part);
  const auto rank = static_cast<uintptr_t>(part.comm->rank);
  const auto num_ranks = static_cast<uintptr_t>(part.comm->num_ranks);
  return one + bytes <= all || all + num_ranks * bytes <= one ||
      one == all + rank * bytes;
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
        if (last.kind != first.kind || last.root != first.root ||
            last.count != first.count || last.dtype != first.dtype ||
            stream_of(last).device().index() != last.comm->device ||
            !are_apart_or_in_place(last)) {
          return kInvalidUsage;
        }
      }
      if (parts.size() != static_cast<size_t>(parts[0].comm->num_ranks)) {
        return kInvalidUsage;
      }
      const auto num_captured =
          std::count_if(parts.begin(), parts.end(), [](const Part& part) {
            return part.stream != nullptr &&
                capture_of(stream_of(part)) != nullptr;
          });
      if (num_captured != 0 &&
          num_captured != static_cast<int64_t>(parts.size())) {
        unusable_cliques.insert(clique); // the ranks deadlock
      }
      if (unusable_cliques.count(clique) != 0) {
        return kInvalidUsage;
      }
      run(parts);
    }
  }
  return 0;
}

nccl::Result add(const Part& part) {
  if (depth == 0) {
    return kInvalidUsage; // alone, it would deadlock
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
    return add(
        {Kind::kReduce, send, receive, count, dtype, root, comm, stream});
  };
  functions.broadcast = [](const void* send,
                           void* receive,
                           size_t count,
                           nccl::DataType dtype,
                           int root,
                           nccl::Comm comm,
                           nccl::Stream stream) {
    return add(
        {Kind::kBroadcast, send, receive, count, dtype, root, comm, stream});
  };
  functions.reduce_scatter = [](const void* send,
                                void* receive,
                                size_t count,
                                nccl::DataType dtype,
                                nccl::Op /*op*/,
                                nccl::Comm comm,
                                nccl::Stream stream) {
    return add(
        {Kind::kReduceScatter, send, receive, count, dtype, 0, comm, stream});
  };
  functions.all_gather = [](const void* send,
                            void* receive,
                            size_t count,
                            nccl::DataType dtype,
                            nccl::Comm comm,
                            nccl::Stream stream) {
    return add(
        {Kind::kAllGather, send, receive, count, dtype, 0, comm, stream});
  };
  return functions;
}

int num_nccl_operations() {
  return num_operations;
}

} // namespace torchkv::mock_cuda

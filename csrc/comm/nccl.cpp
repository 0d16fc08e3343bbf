#include "nccl.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "../core/errors.h"

namespace torchkv::nccl {
namespace {

std::optional<Functions> load() {
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) {
    return std::nullopt;
  }
  Functions found{};
  bool all = true;
  const auto find = [&](auto& function, const char* name) {
    void* const symbol = dlsym(library, name);
    function = reinterpret_cast<std::decay_t<decltype(function)>>(symbol);
    all = all && symbol != nullptr;
  };
  find(found.get_error_string, "ncclGetErrorString");
  find(found.comm_init_all, "ncclCommInitAll");
  find(found.group_start, "ncclGroupStart");
  find(found.group_end, "ncclGroupEnd");
  find(found.reduce, "ncclReduce");
  find(found.broadcast, "ncclBroadcast");
  find(found.reduce_scatter, "ncclReduceScatter");
  find(found.all_gather, "ncclAllGather");
  return all ? std::optional(found) : std::nullopt;
}

std::atomic<const Functions*>& functions_of_tests() {
  static std::atomic<const Functions*> functions{nullptr};
  return functions;
}

} // namespace

const Functions* functions() {
  const Functions* const tests = functions_of_tests();
  if (tests != nullptr) {
    return tests;
  }
  // Not cached if missing: PyTorch may load it later.
  static std::atomic<const Functions*> loaded{nullptr};
  if (loaded == nullptr) {
    if (const auto found = load()) {
      static const Functions functions = *found;
      loaded = &functions;
    }
  }
  return loaded;
}

void set_functions(const Functions* functions) {
  functions_of_tests() = functions;
}

namespace {

// "NCCL: ncclGroupEnd failed: unhandled cuda error"
std::string describe(const char* what, Result result) {
  return c10::str(
      "NCCL: ", what, " failed: ", functions()->get_error_string(result));
}

struct Clique {
  std::vector<Comm> comms;
  std::string problem; // of unusable communicators
};

std::mutex cliques_mutex; // guards them all

// Never freed: see clique().
Clique& clique_of(const std::vector<int>& devices) {
  static auto* cliques =
      new std::map<std::pair<const Functions*, std::vector<int>>, Clique>();
  return (*cliques)[{functions(), devices}];
}

} // namespace

c10::ArrayRef<Comm> clique(const std::vector<int>& devices) {
  const std::lock_guard lock(cliques_mutex);
  Clique& known = clique_of(devices);
  TORCH_CHECK(
      known.problem.empty(),
      "NCCL has failed before on CUDA devices ",
      c10::Join(", ", devices),
      ", whose communicators only a new process can replace: ",
      known.problem);
  if (known.comms.empty()) {
    std::vector<Comm> made(devices.size());
    const Result result = functions()->comm_init_all(
        made.data(), static_cast<int>(devices.size()), devices.data());
    TORCH_CHECK(result == 0, describe("ncclCommInitAll", result));
    known.comms = std::move(made);
  }
  return known.comms;
}

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
  // Groups of several threads must not mix: the order of operations must be the
  // same on all devices of a clique.
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
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
  const std::lock_guard lock(cliques_mutex);
  for (const auto& devices : cliques_) {
    std::string& known = clique_of(devices).problem;
    known = known.empty() ? problem : known;
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

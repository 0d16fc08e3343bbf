#include "nccl_library.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <dlfcn.h>

#include <atomic>
#include <map>
#include <optional>

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

std::string describe(const char* what, Result result) {
  return c10::str(
      "NCCL: ", what, " failed: ", functions()->get_error_string(result));
}

namespace {

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

void give_up(const std::vector<int>& devices, const std::string& problem) {
  const std::lock_guard lock(cliques_mutex);
  Clique& known = clique_of(devices);
  known.problem = known.problem.empty() ? problem : known.problem;
}

std::mutex& group_mutex() {
  static std::mutex mutex;
  return mutex;
}

} // namespace torchkv::nccl

#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "../core/export.h"
#include "../store/options.h"

namespace torchkv::dist {

// A c10d store as a Rendezvous. All keys get the prefix.
TORCHKV_API std::shared_ptr<Rendezvous> make_rendezvous(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& prefix = "");

// The same, with calls that end: StoreTimeoutError if one takes longer than
// `timeout` seconds, and what a signal handler raises. c10d's stores wait
// without an end for a host that is stopped.
TORCHKV_API std::shared_ptr<Rendezvous> bounded(
    std::shared_ptr<Rendezvous> rendezvous,
    int64_t rank,
    double timeout);

// This process in a job, as the program that uses the library knows it.
struct DefaultGroup {
  int64_t rank = 0;
  int64_t world_size = 1;
  std::shared_ptr<Rendezvous> rendezvous;
};
// The Python binding has the default process group as the default, if there is
// one. Called in each create of a store, on the caller's thread.
using GetGroup = std::function<std::optional<DefaultGroup>()>;
TORCHKV_API void set_default_group(GetGroup get);
// Options without a rendezvous get that of the default group, and its rank and
// number of ranks where they have none.
StoreOptions with_default_group(StoreOptions options);

// The TCPStore of MASTER_ADDR and MASTER_PORT: the launcher's if it has one
// (TORCHELASTIC_USE_AGENT_STORE), else rank 0 hosts it. One per process.
// RuntimeError that names what is missing in the environment.
std::shared_ptr<Rendezvous> environment_rendezvous(
    int64_t rank,
    double timeout);

// RANK and WORLD_SIZE, and what tells this start of the job from others.
// RuntimeError where they are not set or not numbers.
struct Launch {
  int64_t rank = 0;
  int64_t world_size = 1;
};
Launch environment_launch(const StoreOptions& options);
// A host that the network of the ranks reaches: the rendezvous' or, if unknown,
// MASTER_ADDR; else this one.
std::string reachable_host(const Rendezvous& rendezvous);
// "<run id>/<restart count>" of torchrun, or empty.
std::string launch_id();

} // namespace torchkv::dist

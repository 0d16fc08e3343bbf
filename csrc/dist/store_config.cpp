#include "store_config.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>

#include "protocol/slice.h"

namespace torchkv::dist {
namespace {

// Of all that the ranks of a store must agree on: the protocol included.
constexpr uint64_t kProtocolVersion = 4;

constexpr double kLongest = 1e9; // seconds; in milliseconds, it fits in 64 bits

} // namespace

double timeout_of(const StoreOptions& options) {
  double timeout = 300;
  if (options.timeout) {
    timeout = *options.timeout;
  } else if (const char* text = std::getenv("TORCHKV_TIMEOUT")) {
    char* end = nullptr;
    timeout = std::strtod(text, &end);
    TORCH_CHECK_VALUE(
        end != text && *end == '\0',
        "create: expected seconds in TORCHKV_TIMEOUT, but got '",
        text,
        "'");
  }
  TORCH_CHECK_VALUE(
      timeout > 0 && timeout <= kLongest,
      "create: expected a positive timeout of at most ",
      kLongest,
      " s, but got ",
      timeout);
  return timeout;
}

Config config_of(
    const Node& node,
    const std::string& type,
    const Policy& policy,
    const StoreOptions& options,
    double timeout) {
  Config config;
  config.job = node.job();
  config.num_workers = node.num_ranks();
  config.num_servers = node.num_ranks();
  config.policy = policy;
  config.heartbeat = options.heartbeat.value_or(1);
  TORCH_CHECK_VALUE(
      config.heartbeat > 0 && config.heartbeat <= kLongest,
      "create: expected a positive heartbeat of at most ",
      kLongest,
      " s, but got ",
      config.heartbeat);
  config.lost = 4 * config.heartbeat;
  if (node.shares_memory()) {
    // Payloads are named, not sent: nothing long holds up what is urgent.
    config.frame_bytes = size_t{64} << 20U;
  }
  config.join = timeout;
  // A server says whom it waits for when it is asked again.
  config.retry = std::clamp(timeout / 4, 0.05, config.retry);
  config.digest = stable_hash(
      c10::str(
          type,
          '/',
          node.num_ranks(),
          '/',
          config.heartbeat,
          '/',
          kProtocolVersion,
          '/',
          config.piece_bytes,
          '/',
          config.split_bytes,
          '/',
          !options.snapshot_dir.empty()));
  return config;
}

} // namespace torchkv::dist

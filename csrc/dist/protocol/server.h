#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core.h"

namespace torchkv::dist {

// One server of a store: it holds a slice of the keys, collects the workers'
// pushes into rounds, and answers pulls. docs/protocol.md documents the rules.
class TORCHKV_API Server final : public Core {
 public:
  // `sinc` identifies this process among all that were ever server `sid`.
  Server(
      int32_t sid,
      int64_t sinc,
      const Config& config,
      Time now,
      const Shard* restored = nullptr);
  ~Server();

  // Events. A frame may be late, repeated or reordered. Call on_timer at least
  // every 100 ms, and at the times of Wake.
  void on_message(const Frame& frame, Time now);
  void on_timer(Time now);
  // The driver believes that the worker is gone. A wrong belief costs an error,
  // never a wrong value.
  void on_peer_lost(int32_t rank, Time now);
  void on_written(int64_t snapshot, Time now);
  void on_measured(const RoundPtr& round, Time now);
  // `error`: what the updater has thrown.
  void on_applied(
      const RoundPtr& round,
      const std::optional<std::string>& error,
      Time now);
};

} // namespace torchkv::dist

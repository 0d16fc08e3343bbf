#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../core/export.h"

namespace torchkv {

// A key-value store of bytes that all processes of a job reach, through which
// they find each other: c10d's Store. Thread-safe.
class TORCHKV_API Rendezvous {
 public:
  virtual ~Rendezvous() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; none: not set within `timeout` seconds.
  virtual std::optional<std::string> get(
      const std::string& key,
      double timeout) = 0;
  // Adds to a number that begins at 0; returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Sets a key that does not exist; returns its value.
  virtual std::string set_once(
      const std::string& key,
      const std::string& value) = 0;
  // A host through which all processes reach it; empty: unknown.
  virtual std::string host() const {
    return {};
  }
};

// Options of a store; those on one machine take none.
struct StoreOptions {
  // Stores of different ranks are one by their type and name.
  std::string name;
  // Of this process among those that share the store; none: as the environment
  // variables RANK and WORLD_SIZE say.
  std::optional<int64_t> rank;
  std::optional<int64_t> world_size;
  // Null: that of the environment variables MASTER_ADDR and MASTER_PORT.
  std::shared_ptr<Rendezvous> rendezvous;
  // Seconds after which a call fails; none: TORCHKV_TIMEOUT, or 300.
  std::optional<double> timeout;
  std::optional<double> heartbeat; // its period in seconds; none: 1
  std::string security; // empty: what the hosts need
  std::string snapshot_dir; // empty: no snapshots
  // After so many rounds or seconds.
  int64_t snapshot_rounds = 0;
  double snapshot_seconds = 0;

  bool is_default() const {
    return name.empty() && !rank && !world_size && rendezvous == nullptr &&
        !timeout && !heartbeat && security.empty() && snapshot_dir.empty() &&
        snapshot_rounds == 0 && snapshot_seconds == 0;
  }
};

} // namespace torchkv

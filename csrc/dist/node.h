#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <c10/macros/Macros.h>

#include "../core/export.h"
#include "../store/options.h"
#include "background.h"
#include "protocol/config.h"
#include "rendezvous.h"
#include "transport/frame.h"
#include "transport/shared_memory.h"
#include "transport/transport.h"

namespace torchkv::dist {

class Session;

// This process among those of a job: one transport and one thread for all its
// stores. Never destroyed: close_all() ends it.
class Node final : public Transport::Handler {
 private:
  struct Private {};

 public:
  // The node of the job that the options and the environment name; made by the
  // first call, which waits for the other ranks. RuntimeError if they do not
  // come within `timeout` seconds.
  static std::shared_ptr<Node> join(
      const StoreOptions& options,
      const Launch& launch,
      double timeout);
  Node(
      Private,
      std::shared_ptr<Rendezvous> rendezvous,
      std::string prefix,
      const std::string& token,
      const StoreOptions& options,
      const Launch& launch,
      double timeout);
  C10_DISABLE_COPY_AND_ASSIGN(Node);

  int32_t rank() const {
    return rank_;
  }
  int32_t num_ranks() const {
    return num_ranks_;
  }
  int64_t job() const {
    return job_;
  }
  // Of this process among those that have had the rank.
  int64_t incarnation() const {
    return incarnation_;
  }
  // Unique among the servers of the job.
  int64_t server_incarnation() const {
    return incarnation_ * num_ranks_ + rank_ + 1;
  }
  static Time now() {
    return std::chrono::duration<double>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
  std::mutex& mutex() {
    return mutex_;
  }
  const std::string& security() const {
    return security_;
  }
  // For values that travel to other ranks of this host; null: none.
  const std::shared_ptr<SharedMemory>& memory() const {
    return memory_;
  }
  // Whether all ranks are on this host, with it.
  bool shares_memory() const {
    return shares_memory_;
  }
  const std::shared_ptr<Rendezvous>& rendezvous() const {
    return rendezvous_;
  }
  // Of its keys there.
  const std::string& prefix() const {
    return prefix_;
  }
  // What rank 0 says of a store: `value` there, which others wait for.
  std::string agree(const std::string& key, const std::string& value);
  // Whether the process ends.
  bool is_stopped();
  // How many stores of this id were made on this rank before.
  int64_t num_made(uint64_t id);

  // These need the mutex.

  bool is_stopping() const {
    return stopping_;
  }
  // To a server or a worker of `rank`; see Transport.
  void send(int32_t rank, Direction direction, Frame frame);
  // Hands over frames that have reached this rank.
  void deliver();
  void wake_at(Time time);
  // See Transport.
  void reclaim();
  void add(uint64_t store, std::shared_ptr<Session> session);
  // The node keeps a session until its close call has ended.

  void on_frame(int32_t rank, Direction direction, Frame frame) override;
  void on_peer_lost(int32_t rank) override;

  // Closes all sessions and waits for their ends, at most `timeout` seconds.
  // Called before the process ends. Without the mutex.
  TORCHKV_API static void close_all(double timeout);
  static constexpr double kExitTimeout = 86400;

 private:
  std::unique_ptr<Transport> make_direct();
  std::unique_ptr<Transport> make_zeromq(
      const Token& token,
      const StoreOptions& options,
      double timeout);
  void close(double timeout);
  void loop();

  const int32_t rank_;
  const int32_t num_ranks_;
  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::string prefix_; // of its keys
  const std::string security_; // as StoreOptions
  const double timeout_;
  std::shared_ptr<SharedMemory> memory_;
  bool shares_memory_ = false;
  int64_t job_ = 0;
  int64_t incarnation_ = 0;

  std::mutex mutex_; // guards the rest
  std::unique_ptr<Transport> transport_;
  std::unordered_map<uint64_t, std::shared_ptr<Session>> sessions_;
  std::unordered_map<uint64_t, int64_t> num_made_;
  // Of each rank, its latest hello to a store that this rank has not made yet.
  struct Early {
    uint64_t store;
    Frame frame;
  };
  std::vector<Early> early_;
  Time next_timer_ = 0;
  bool stopping_ = false;
  std::unique_ptr<Background> reaper_; // of closed sessions
  std::thread thread_;
};

} // namespace torchkv::dist

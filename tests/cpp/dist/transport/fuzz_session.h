#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dist/protocol/server.h"
#include "dist/protocol/worker.h"
#include "dist/transport/frame.h"
#include "frame_mutator.h"
#include "random_frame.h"

namespace torchkv::dist {

// Ends the program, with what is needed to run the input again.
[[noreturn]] void fuzz_failed(const char* what);
inline void fuzz_expect(bool condition, const char* what) {
  if (!condition) {
    fuzz_failed(what);
  }
}

// Bytes that have been allocated since the last call; 0 without a sanitizer.
size_t fuzz_allocated();

// Decodes an input. If it is accepted, another encoding must be equal to it.
std::optional<Frame> fuzz_decode(
    const FrameMutator::Input& input,
    Direction direction,
    const Limits& limits);

constexpr size_t kQueryBytes = 100; // and as many of its answer

// A store's workers and servers at work, in virtual time, while a stranger who
// knows the token injects frames like theirs.
class FuzzSession {
 public:
  // `is_calm`: nobody injects anything, and all calls must succeed.
  FuzzSession(uint64_t seed, bool is_calm);

  // Until everything is done or `max_inputs` have been injected.
  void run(int64_t max_inputs);

  int64_t num_inputs() const {
    return num_inputs_;
  }
  int64_t num_accepted() const {
    return num_accepted_;
  }
  // Of all frames that the cores were given.
  size_t num_bytes() const {
    return num_bytes_;
  }
  int64_t num_rounds() const {
    return num_rounds_;
  }
  int64_t num_returns() const {
    return num_returns_;
  }

 private:
  struct Packet {
    Address to;
    FrameMutator::Input input;
  };
  struct Work {
    int32_t server;
    RoundPtr round;
    bool is_measure;
  };
  struct Program {
    size_t next = 0;
    int64_t inc = 1;
    std::map<CallId, Request::Kind> calls; // that have not returned
    bool is_closed = false;
  };

  static Config make_config(RandomFrames& random);
  void make_requests();
  Request::Item make_item(int64_t key);
  void join(Request& request);
  Request make_request();
  static bool may_begin(const Program& program, const Request& request);
  Request altered(const Request& request);
  std::vector<Place> places_of(const Key& key, const KeySpec& spec) const;
  void make_server(int32_t sid, const Shard* restored);
  void make_worker(int32_t rank);
  Direction direction_to(const Address& to) const {
    return to.role == Address::Role::kServer ? Direction::kRequest
                                             : Direction::kAnswer;
  }
  const KeySpec& spec_of(const Key& key) const;
  size_t bytes_of(const SliceId& slice) const;
  bool is_done() const;

  void step();
  void disturb();
  void tick();
  void begin_calls();
  void work_on(size_t at);
  void deliver(const Packet& packet);
  void inject_like(const Packet& packet, const Frame& frame);
  void inject(const Packet& packet);
  void hand_over(const Address& to, const Frame& frame);
  void perform(const Address& of, Actions actions);
  void perform_all();
  void check(const Round& round);
  void check(int32_t rank, const Return& result);

  RandomFrames random_;
  FrameMutator mutator_;
  const bool is_calm_;
  const Config config_;
  ListCache known_lists_;
  const Limits limits_;
  const Time begin_; // of the injections
  const int32_t wrong_rank_; // whose program differs; -1: none
  Time now_ = 0;
  std::vector<Request> requests_;
  std::map<int64_t, KeySpec> specs_;
  std::vector<SliceListPtr> lists_; // in requests
  std::vector<std::unique_ptr<Server>> servers_;
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Program> programs_;
  std::deque<Packet> packets_;
  std::deque<Work> work_;
  std::vector<Frame> seen_; // to make others of
  // Shared memory: (kid, version) in the segments of slots.
  std::map<uint64_t, std::pair<int64_t, int64_t>> stamps_;
  uint64_t last_segment_ = 0;
  std::vector<std::optional<Shard>> shards_; // on disk, by server

  int64_t num_inputs_ = 0;
  int64_t max_inputs_ = 0;
  int64_t num_accepted_ = 0;
  int64_t num_rounds_ = 0;
  int64_t num_returns_ = 0;
  size_t num_bytes_ = 0;
};

} // namespace torchkv::dist

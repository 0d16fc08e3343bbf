#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "simulation.h"

namespace torchkv::dist::simulation {

// Runs one worker's program, and keeps its part of the history.
class App {
 public:
  App(Simulation& simulation,
      Process& process,
      const NodeId& id,
      const Program& program,
      size_t pc,
      int64_t inc,
      std::deque<Instruction> prelude);

  void run();
  void returned(const Return& result);
  // Checks that pieces do not change between their delivery and the end of the
  // call.
  void delivered(const Blob& piece);
  // Makes the pushes wrong that the program wants to be.
  void tamper(Frame& frame);

  const NodeId& id() const {
    return id_;
  }
  int rank() const {
    return id_.number;
  }
  bool done() const {
    return done_;
  }
  bool has_calls() const {
    return !rows_.empty();
  }
  const Process& process() const {
    return process_;
  }
  const Program& program() const {
    return program_;
  }
  size_t pc() const {
    return pc_;
  }
  const std::vector<Key>& dead_keys() const {
    return dead_keys_;
  }
  void adopt(const App& old);

 private:
  struct Corruption {
    Key key;
    std::map<SliceId, std::pair<int64_t, int64_t>> pushes; // (round, opno)
  };

  bool step();
  bool must_wait() const;
  bool is_dead(const Key& key) const;
  void wake();
  void issue(const Instruction& instruction, int64_t pc);
  std::vector<Request::Query> queries_of(const Item& item, Row& row);
  Request request_of(const Instruction& instruction, Row& row);
  Request::Item item_of(
      const Instruction& instruction,
      const Item& item,
      Row& row);
  void join(Request& request, Row& row) const;
  static void note_part(Row& row, const SliceResult& from);
  void note_parts(Row& row, const SliceResult& from);
  bool has_key(const Key& key) const;
  int64_t numel(const Key& key) const;
  void note_rounds(const Row& row);
  void failed(const Error& error, const Row& row);
  void give_up();
  void rejoin();

  Simulation& simulation_;
  Process& process_;
  Node* node_ = nullptr;
  const NodeId id_;
  const Program& program_;
  size_t pc_;
  const int64_t inc_;
  std::deque<Instruction> prelude_; // what a worker that comes back does first
  std::map<CallId, Row*> rows_; // that have not ended
  int64_t num_regions_ = 0;
  CallId blocked_ = 0;
  bool busy_ = false;
  bool done_ = false;
  bool asleep_ = false;
  bool acted_ = false; // its core has actions to take
  std::vector<Key> dead_keys_; // that were on a lost server
  std::vector<std::pair<Key, int64_t>> keys_; // with their number of elements
  std::map<SliceId, int64_t> rounds_; // pushes issued
  std::vector<Corruption> corruptions_;
  struct Delivered {
    std::weak_ptr<const void> owner; // other pieces may have the address later
    uint64_t sum = 0;
  };
  std::map<const std::byte*, Delivered> delivered_;
};

// The keys that the program has begun before `pc`, as inits.
std::deque<Instruction> inits(const Program& program, size_t pc);

} // namespace torchkv::dist::simulation

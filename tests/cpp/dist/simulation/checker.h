#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulation.h"

namespace torchkv::dist::simulation {

// Reads what the workers called and what came back, and knows the programs; of
// the servers it uses only the order of updates, for staleness and quorum, and
// what they have at the end.
class Checker {
 public:
  explicit Checker(const Simulation& simulation);

  // What is wrong.
  std::vector<std::string> check();

 private:
  // One call, or one key of a call on a list.
  struct Entry {
    const Row* row = nullptr;
    Instruction::Kind kind = Instruction::Kind::kNop;
    const Item* item = nullptr;
    std::vector<const Part*> parts;
    int phase = 0; // barriers that the rank had begun before
    int rates = 0; // changes of the rate that rank 0 had asked for

    bool is_push() const {
      return kind == Instruction::Kind::kPush ||
          kind == Instruction::Kind::kPushPull;
    }
    // Whether `parts` are values.
    bool has_values() const {
      return (kind == Instruction::Kind::kPull ||
              kind == Instruction::Kind::kPushPull) &&
          row->succeeded();
    }
  };
  using Entries = std::vector<Entry>;
  using Contents = std::vector<std::pair<int, int64_t>>;

  void bad(const std::string& what);
  Entries entries_of(size_t store) const;

  void calls_end();
  void leases_end();
  void errors_are_right();
  bool is_right(
      const Row& row,
      const Error& error,
      const std::set<int>& culprits) const;
  bool is_right_misuse(
      const Misuse& wrong,
      const Error& error,
      const std::set<int>& culprits) const;
  void programs_end();
  void versions(size_t store, const Entries& entries);
  void ages(const Entries& entries);

  // check_sync.cpp: the program alone says what every pull must bring.
  void sync_values(size_t store, const Entries& entries);
  // check_async.cpp: each push that was acknowledged once, no other more than
  // once.
  void async_values(size_t store, Entries entries);
  // check_bounds.cpp: staleness and quorum.
  void bounds(size_t store, const Entries& entries);

  // What is in a slice, of which all elements must tell the same.
  Contents content(const Part& part, const Row& row);

  const Simulation& simulation_;
  const Plan& plan_;
  std::vector<std::string> problems_;
};

} // namespace torchkv::dist::simulation

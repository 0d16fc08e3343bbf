#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/key.h"
#include "dist/protocol/config.h"
#include "element.h"

namespace torchkv::dist::simulation {

enum class Mode { kSync, kAsync, kSsp, kQuorum };
enum class Profile { kCalm, kFlaky, kCrash, kMisuse, kRestart };
constexpr int kNumModes = 4;
constexpr int kNumProfiles = 5;
const char* name(Mode mode);
const char* name(Profile profile);

// Learning rates, none of which is a product or a multiple of others and of
// the weights, so that a value says which ones were used.
constexpr std::array<int64_t, 16> kRates = {
    1,
    101,
    211,
    307,
    401,
    503,
    601,
    701,
    809,
    907,
    1009,
    1103,
    1201,
    1301,
    1409,
    1511};

// A key in an instruction.
struct Item {
  Key key;
  int numel = 0; // of an init
  bool whole = false;
  int dtype = 6;
  int uid = -1; // of a push: a number per key
  int weight = 1;
  Poison poison = Poison::kNone;
  int64_t priority = 0;
  int64_t min_version = 0; // of a pull
  int stride = 0; // of a pull: every so many elements of a slice; 0: the value
};

struct Instruction {
  enum class Kind {
    kNop,
    kInit,
    kPush,
    kPushPull,
    kPull,
    kDelete,
    kConfig,
    kBarrier,
    kSnapshot,
    kClose,
    kSleep,
    kWait,
    kStop,
  };
  Kind kind = Kind::kNop;
  std::vector<Item> items;
  bool is_list = false;
  bool two_phase = false;
  bool block = false; // the program waits for the end of the call
  bool corrupt = false; // a push with the wrong round
  double timeout = 0; // 0: the plan's; else the program goes on after it
  double sleep = 0;
  int64_t rate = 0; // kConfig

  bool is_push() const {
    return kind == Kind::kPush || kind == Kind::kPushPull;
  }
  bool is_single_push() const {
    return is_push() && !is_list;
  }
};
const char* name(Instruction::Kind kind);
using Program = std::vector<Instruction>;

// One rank's program goes wrong in one way.
struct Misuse {
  enum class Kind { kShape, kSkip, kRound, kConfig, kEarlyClose };
  Kind kind = Kind::kShape;
  int rank = 0;
  std::optional<Key> key;
};

// All that does not depend on the network.
struct Plan {
  uint64_t seed = 0;
  Mode mode = Mode::kSync;
  Profile profile = Profile::kCalm;
  int num_workers = 1;
  int num_servers = 1;
  bool colocated = false;
  Policy policy;
  bool push_regions = false;
  bool leases = false;
  double work = 0; // the longest that an apply takes
  double copy = 0; // the same for a copy of a lease
  double lists = 0; // share of steps with lists
  bool joins = false; // calls on several keys name them together
  double poison = 0; // share of pushes on which the updater throws
  double hasty = 0; // share of pushes with a short time-out
  double timeout = 20;
  std::vector<std::vector<Program>> programs; // by store, rank
  std::optional<Misuse> misuse;

  bool is_sync(size_t store) const {
    return mode == Mode::kSync || store == 1;
  }
  std::string text() const;
};

Plan make_plan(uint64_t seed, Mode mode, Profile profile);

} // namespace torchkv::dist::simulation

#include "plan.h"

#include <algorithm>
#include <map>
#include <sstream>

#include "random.h"

namespace torchkv::dist::simulation {

namespace {

using Kind = Instruction::Kind;

// The parts of a step on one key, as letters: p push, P pushpull, g pull.
using Shape = std::vector<std::pair<Key, std::string>>;

class ProgramMaker {
 public:
  ProgramMaker(Random& random, const Plan& plan, bool is_sync, bool is_first)
      : random_(random),
        plan_(plan),
        is_sync_(is_sync),
        // Then they march in step.
        is_aligned_(is_sync || plan.mode != Mode::kAsync),
        may_wait_for_versions_(
            !is_aligned_ && is_first &&
            (plan.profile == Profile::kCalm ||
             plan.profile == Profile::kFlaky)),
        programs_(static_cast<size_t>(plan.num_workers)),
        numbers_(programs_.size()),
        counts_(programs_.size()) {}

  std::vector<Program> make();

 private:
  struct KeyPlan {
    int numel;
    bool whole;
  };

  template <class F>
  void each(F make) {
    for (Program& program : programs_) {
      program.push_back(make());
    }
  }
  void all(Kind kind) {
    each([&] {
      Instruction instruction;
      instruction.kind = kind;
      instruction.block = kind != Kind::kWait;
      return instruction;
    });
  }
  // Of rank 0 only.
  void lead(Kind kind, int64_t rate = 0) {
    Instruction instruction;
    instruction.kind = kind;
    instruction.rate = rate;
    programs_[0].push_back(instruction);
    for (size_t rank = 1; rank < programs_.size(); ++rank) {
      programs_[rank].emplace_back();
    }
  }
  void all_on(Kind kind, const Key& key) {
    each([&] {
      Instruction instruction;
      instruction.kind = kind;
      instruction.block = true;
      Item item{key};
      item.numel = keys_.at(key_index(key)).second.numel;
      item.whole = keys_.at(key_index(key)).second.whole;
      instruction.items.push_back(item);
      return instruction;
    });
  }
  size_t key_index(const Key& key) const {
    size_t i = 0;
    while (!(keys_[i].first == key)) {
      ++i;
    }
    return i;
  }
  std::vector<Key> some_keys() {
    std::vector<Key> names;
    names.reserve(keys_.size());
    for (const auto& [key, unused] : keys_) {
      names.push_back(key);
    }
    return random_.sample(
        names,
        static_cast<size_t>(
            random_.integer(1, static_cast<int>(names.size()))));
  }

  Item push_item(size_t rank, const Key& key, double* timeout);
  Item pull_item(size_t rank, const Key& key);
  void add_single(size_t rank, Kind kind, const Key& key);
  void add_list(size_t rank, Kind kind, std::vector<Key> keys, bool two_phase);
  void replace_key();
  void step(double pauses);

  Random& random_;
  const Plan& plan_;
  const bool is_sync_;
  const bool is_aligned_;
  const bool may_wait_for_versions_;
  std::vector<Program> programs_;
  std::vector<std::pair<Key, KeyPlan>> keys_;
  std::vector<std::map<size_t, int>> numbers_; // pushes of each key, by rank
  // The same since the last init, without those that may leave no trace.
  std::vector<std::map<size_t, int64_t>> counts_;
  size_t rate_ = 0;
};

Item ProgramMaker::push_item(size_t rank, const Key& key, double* timeout) {
  const int number = numbers_[rank][key_index(key)]++;
  Item item{key};
  item.uid = number * plan_.num_workers + static_cast<int>(rank);
  item.weight = random_.integer(1, 3);
  item.priority = random_.integer(0, 3);
  if (random_.chance(plan_.poison)) {
    item.poison = is_sync_
        ? random_.choose({Poison::kBefore, Poison::kHalf, Poison::kAfter})
        : random_.choose({Poison::kBefore, Poison::kAfter});
  }
  const double hasty = random_.uniform(0.001, 0.1);
  const bool is_hasty = random_.chance(plan_.hasty);
  if (timeout != nullptr && is_hasty) {
    *timeout = hasty;
  } else {
    ++counts_[rank][key_index(key)];
  }
  return item;
}

Item ProgramMaker::pull_item(size_t rank, const Key& key) {
  Item item{key};
  item.priority = random_.integer(0, 3);
  if (random_.chance(plan_.joins ? 0.02 : 0.2)) {
    item.stride = random_.integer(1, 3);
  }
  if (may_wait_for_versions_ && random_.chance(0.2)) {
    // Each waits for pushes of lower ranks only, and those are sure to come.
    for (size_t other = 0; other <= rank; ++other) {
      item.min_version += counts_[other][key_index(key)];
    }
  }
  return item;
}

void ProgramMaker::add_single(size_t rank, Kind kind, const Key& key) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.items.push_back(
      kind == Kind::kPull ? pull_item(rank, key)
                          : push_item(rank, key, &instruction.timeout));
  programs_[rank].push_back(instruction);
}

void ProgramMaker::add_list(
    size_t rank,
    Kind kind,
    std::vector<Key> keys,
    bool two_phase) {
  Instruction instruction;
  instruction.kind = kind;
  instruction.is_list = true;
  instruction.two_phase = two_phase;
  for (const Key& key : random_.shuffled(std::move(keys))) {
    instruction.items.push_back(
        kind == Kind::kPull ? pull_item(rank, key)
                            : push_item(rank, key, nullptr));
  }
  programs_[rank].push_back(instruction);
}

// Deletes a key and makes it anew.
void ProgramMaker::replace_key() {
  const size_t i = static_cast<size_t>(
      random_.integer(0, static_cast<int>(keys_.size()) - 1));
  const Key key = keys_[i].first;
  if (random_.chance(0.5)) { // else the worker waits
    all(Kind::kWait);
  }
  all_on(Kind::kDelete, key);
  keys_[i].second.numel = random_.choose({1, 2, 3, 5, 7, 9});
  all_on(Kind::kInit, key);
  for (auto& counts : counts_) {
    counts[i] = 0;
  }
}

void ProgramMaker::step(double pauses) {
  each([&] {
    Instruction instruction;
    instruction.kind = Kind::kSleep;
    instruction.sleep = random_.uniform(0, pauses);
    return instruction;
  });
  std::vector<Key> chosen = some_keys();
  if (plan_.joins && random_.chance(0.8)) {
    chosen.clear();
    for (const auto& [key, unused] : keys_) {
      chosen.push_back(key);
    }
  }
  Shape shape;
  for (const Key& key : chosen) {
    shape.emplace_back(key, random_.choose({"p", "P", "pg", "pg", "ppg"}));
  }
  const bool listed = random_.chance(plan_.lists);
  const bool two_phase = is_sync_ && random_.chance(plan_.joins ? 0.1 : 0.6);
  const Kind list_kind = random_.chance(0.25) ? Kind::kPushPull : Kind::kPush;
  const bool pulls_listed = listed && random_.chance(plan_.joins ? 0.6 : 0.3);
  if (listed && is_aligned_) {
    shape.clear();
    const bool is_alone = plan_.joins && random_.chance(0.8);
    for (const Key& key : chosen) {
      if (!is_alone && random_.chance(0.6)) {
        shape.emplace_back(key, "g");
      }
    }
  }
  for (size_t rank = 0; rank < programs_.size(); ++rank) {
    if (listed) {
      add_list(rank, list_kind, chosen, two_phase);
    }
    if (pulls_listed) {
      add_list(rank, Kind::kPull, chosen, false);
    }
    Shape mine = shape;
    if (!is_aligned_ && listed && plan_.joins && random_.chance(0.8)) {
      mine.clear();
    } else if (!is_aligned_) {
      mine.clear();
      for (const Key& key : some_keys()) {
        mine.emplace_back(key, random_.choose({"p", "P", "pg", "g"}));
      }
    }
    for (const auto& [key, parts] : random_.shuffled(mine)) {
      for (const char part : parts) {
        add_single(
            rank,
            part == 'g'       ? Kind::kPull
                : part == 'P' ? Kind::kPushPull
                              : Kind::kPush,
            key);
      }
    }
  }
  const bool waits = random_.chance(plan_.joins ? 0.9 : 0.7);
  for (Program& program : programs_) {
    if (is_aligned_ ? waits : random_.chance(plan_.joins ? 0.9 : 0.6)) {
      program.emplace_back();
      program.back().kind = Kind::kWait;
    }
  }
}

std::vector<Program> ProgramMaker::make() {
  const bool int_keys = random_.chance(0.3);
  const std::vector<Key> names = int_keys
      ? std::vector<Key>{3, int64_t{1099511627776}, -1, 0}
      : std::vector<Key>{"a", "b", "c", "d"};
  const int num_keys = random_.integer(plan_.joins ? 3 : 1, 4);
  for (int i = 0; i < num_keys; ++i) {
    const int numel = plan_.joins && random_.chance(0.8)
        ? random_.choose({1, 2})
        : random_.choose({1, 2, 3, 5, 7, 9});
    const KeyPlan key{numel, random_.chance(0.2)};
    keys_.emplace_back(names[static_cast<size_t>(i)], key);
  }
  for (const auto& [key, unused] : keys_) {
    all_on(Kind::kInit, key);
  }
  const double pauses = random_.choose({0.0, 0.05, 0.3});
  const bool is_restart = plan_.profile == Profile::kRestart;
  const int more = plan_.joins ? 5 : 0; // slices join after some steps
  const int steps =
      more + (is_restart ? random_.integer(5, 9) : random_.integer(2, 7));
  for (int i = 0; i < steps; ++i) {
    if (random_.chance(0.35) && rate_ + 1 < kRates.size()) {
      ++rate_;
      lead(Kind::kConfig, kRates.at(rate_));
    }
    if (random_.chance(0.15)) {
      all(Kind::kBarrier);
    }
    if (random_.chance(is_restart ? 0.6 : 0.15)) {
      lead(Kind::kSnapshot);
    }
    if (random_.chance(0.15) &&
        (plan_.profile != Profile::kCrash || is_sync_)) {
      replace_key();
    }
    step(pauses);
  }
  return std::move(programs_);
}

void finish(std::vector<Program>& programs, const std::vector<Key>& keys) {
  for (Program& program : programs) {
    const auto add = [&](Kind kind, bool block) {
      program.emplace_back();
      program.back().kind = kind;
      program.back().block = block;
    };
    add(Kind::kBarrier, true);
    for (const Key& key : keys) {
      add(Kind::kPull, false);
      program.back().items.push_back(Item{key});
    }
    add(Kind::kWait, false);
    add(Kind::kBarrier, true);
    add(Kind::kClose, true);
  }
}

std::vector<Key> keys_of(const Program& program) {
  std::vector<Key> keys;
  for (const Instruction& instruction : program) {
    if (instruction.kind == Kind::kInit) {
      const Key& key = instruction.items[0].key;
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        keys.push_back(key);
      }
    }
  }
  return keys;
}

template <class F>
std::vector<size_t> positions(const Program& program, F wanted) {
  std::vector<size_t> found;
  for (size_t i = 0; i < program.size(); ++i) {
    if (wanted(program[i])) {
      found.push_back(i);
    }
  }
  return found;
}

Misuse misuse(Random& random, bool is_sync, std::vector<Program>& programs) {
  using Wrong = Misuse::Kind;
  Misuse wrong;
  wrong.kind = is_sync
      ? random.choose(
            {Wrong::kShape,
             Wrong::kSkip,
             Wrong::kRound,
             Wrong::kConfig,
             Wrong::kEarlyClose})
      : random.choose({Wrong::kShape, Wrong::kRound, Wrong::kConfig});
  wrong.rank = random.integer(1, static_cast<int>(programs.size()) - 1);
  Program& program = programs[static_cast<size_t>(wrong.rank)];
  if (wrong.kind == Wrong::kShape) {
    const size_t at = random.choose(positions(
        program, [](const auto& i) { return i.kind == Kind::kInit; }));
    Item& item = program[at].items[0];
    wrong.key = item.key;
    const int how = random.integer(0, 9);
    if (how < 3) {
      item.whole = !item.whole;
    } else if (how < 5) {
      item.dtype = 7;
    } else {
      item.numel += random.choose({1, 4});
    }
    return wrong;
  }
  const auto pushes =
      positions(program, [](const auto& i) { return i.is_single_push(); });
  if (wrong.kind == Wrong::kConfig || pushes.empty()) {
    wrong.kind = Wrong::kConfig;
    return wrong;
  }
  const size_t at = random.choose(pushes);
  wrong.key = program[at].items[0].key;
  if (wrong.kind == Wrong::kRound) {
    program[at].corrupt = true;
  } else if (wrong.kind == Wrong::kSkip) {
    program[at] = Instruction();
  } else {
    program.resize(at);
    for (const Kind kind : {Kind::kWait, Kind::kClose, Kind::kStop}) {
      program.emplace_back();
      program.back().kind = kind;
      program.back().block = kind == Kind::kClose;
    }
  }
  return wrong;
}

Policy make_policy(Random& random, Mode mode, int num_workers) {
  Policy policy;
  if (mode == Mode::kAsync || mode == Mode::kSsp) {
    policy.quorum = 1;
  }
  if (mode == Mode::kSsp) {
    policy.staleness = random.choose({0, 1, 2, 4});
  }
  if (mode == Mode::kQuorum) {
    policy.quorum = random.integer(1, num_workers);
    policy.grace = random.choose({0.0, 0.05, 0.3});
  }
  return policy;
}

} // namespace

Plan make_plan(uint64_t seed, Mode mode, Profile profile) {
  const auto cell = static_cast<uint64_t>(mode) * kNumProfiles +
      static_cast<uint64_t>(profile);
  Random random(mix(seed, cell));
  const bool calm = profile == Profile::kCalm;
  const bool fair = calm || profile == Profile::kFlaky;
  Plan plan;
  plan.seed = seed;
  plan.mode = mode;
  plan.profile = profile;
  plan.num_workers =
      calm ? random.choose({1, 2, 3, 4}) : random.choose({2, 3, 3, 4});
  plan.num_servers = random.choose({1, 2, 2, 3});
  plan.colocated = random.chance(0.5) && plan.num_servers <= plan.num_workers;
  plan.policy = make_policy(random, mode, plan.num_workers);
  const int num_stores = fair && random.chance(0.15) ? 2 : 1;
  plan.push_regions = random.chance(0.5);
  plan.leases = random.chance(0.5);
  plan.work = random.choose({0.0, 0.005, 0.05, 0.2});
  plan.copy = random.choose({0.0, 0.005, 0.05, 0.2});
  plan.lists = random.choose({0.0, 0.3, 0.6});
  plan.poison = random.choose({0.0, 0.0, 0.05});
  plan.hasty = random.choose({0.0, 0.0, 0.2});
  // By a number of their own, so that other plans stay as they were.
  plan.joins = Random(mix(seed, cell + 1000)).chance(0.35);
  if (plan.joins) {
    plan.push_regions = plan.leases = false;
    plan.lists = 0.8;
    plan.num_servers = std::min(plan.num_servers, 2);
  }
  plan.timeout =
      profile == Profile::kCrash || profile == Profile::kMisuse ? 6.0 : 20.0;
  if (plan.joins) { // there are more steps from one barrier to the next
    plan.timeout = 20.0;
  }
  for (int store = 0; store < num_stores; ++store) {
    const bool is_sync = mode == Mode::kSync || store == 1;
    ProgramMaker maker(random, plan, is_sync, store == 0);
    plan.programs.push_back(maker.make());
    std::vector<Program>& programs = plan.programs.back();
    const std::vector<Key> keys = keys_of(programs[0]);
    if (profile == Profile::kMisuse && store == 0) {
      plan.misuse = misuse(random, is_sync, programs);
    }
    finish(programs, keys);
  }
  return plan;
}

} // namespace torchkv::dist::simulation

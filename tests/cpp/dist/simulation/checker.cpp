#include "checker.h"

#include <algorithm>

#include "app.h"

namespace torchkv::dist::simulation {

using Kind = Instruction::Kind;

Checker::Checker(const Simulation& simulation)
    : simulation_(simulation),
      plan_(simulation.plan()),
      problems_(simulation.problems()) {}

void Checker::bad(const std::string& what) {
  problems_.push_back(what);
}

std::vector<std::string> Checker::check() {
  calls_end();
  programs_end();
  leases_end();
  errors_are_right();
  for (size_t store = 0; store < plan_.programs.size(); ++store) {
    const Entries entries = entries_of(store);
    if (plan_.is_sync(store)) {
      sync_values(store, entries);
    } else {
      async_values(store, entries);
      bounds(store, entries);
    }
    versions(store, entries);
    ages(entries);
  }
  return problems_;
}

Checker::Entries Checker::entries_of(size_t store) const {
  Entries entries;
  for (const Row& row : simulation_.history()) {
    if (row.store != store) {
      continue;
    }
    const Instruction& instruction = row.instruction;
    Entry entry;
    entry.row = &row;
    entry.kind = instruction.kind;
    if (instruction.items.empty()) {
      entries.push_back(entry);
    }
    for (const Item& item : instruction.items) {
      entry.item = &item;
      entry.parts.clear();
      for (const Part& part : row.parts) {
        if (part.slice.key == item.key) {
          entry.parts.push_back(&part);
        }
      }
      entries.push_back(entry);
    }
  }
  return entries;
}

Checker::Contents Checker::content(const Part& part, const Row& row) {
  if (part.elements.empty()) {
    bad("empty: " + text_of(row));
    return {};
  }
  for (const Element& element : part.elements) {
    if (element != part.elements[0]) {
      bad("torn: " + text_of(row));
      break;
    }
  }
  return contents(part.elements[0]);
}

// Every call ends in time.
void Checker::calls_end() {
  for (const Row& row : simulation_.history()) {
    const Time late = row.t0 + plan_.timeout + 0.5 + row.paused;
    const Process* process = row.process;
    const bool is_late = row.t1 ? *row.t1 > late
                                : process != nullptr && process->alive &&
            !process->paused && simulation_.now() > late;
    if (is_late) {
      bad("hang: " + text_of(row));
    }
  }
}

void Checker::programs_end() {
  for (const App* app : simulation_.apps()) {
    const Process& process = app->process();
    if (process.alive && !process.paused && !app->done()) {
      bad("stuck: rank " + std::to_string(app->rank()) + " at " +
          std::to_string(app->pc()));
    }
    const bool is_fair =
        plan_.profile == Profile::kCalm || plan_.profile == Profile::kFlaky;
    if (is_fair && (!app->done() || app->has_calls())) {
      bad("unfinished: rank " + std::to_string(app->rank()));
    }
  }
  const auto& history = simulation_.history();
  if (plan_.profile == Profile::kRestart &&
      simulation_.statistics()[Count::kRestarts] != 0 &&
      std::none_of(history.begin(), history.end(), [&](const Row& row) {
        return row.job == simulation_.job() && row.succeeded() &&
            row.instruction.kind == Kind::kClose;
      })) {
    bad("unfinished after the restart");
  }
}

// Only a session that lives holds memory of a value.
void Checker::leases_end() {
  for (const auto& [unused, node] : simulation_.servers()) {
    for (const auto& slice : node->server->slices()) {
      for (const auto& lease : slice.leases) {
        if (lease.state != PeerState::kUp) {
          bad("leak: " + slice.slice.text() + " leased to " +
              std::to_string(lease.rank) + "." + std::to_string(lease.inc));
        }
      }
    }
  }
}

// Errors name the right rank, server and key.
void Checker::errors_are_right() {
  std::set<int> culprits; // who is waited for because of the misuse
  bool noticed = !plan_.misuse;
  for (const Row& row : simulation_.history()) {
    if (!row.error || !plan_.misuse) {
      continue;
    }
    const auto& missing = row.error->missing;
    const bool is_timeout = row.error->code == ErrorCode::kTimeout;
    if (is_timeout &&
        std::find(missing.begin(), missing.end(), plan_.misuse->rank) !=
            missing.end()) {
      culprits.insert(row.rank);
    }
    noticed = noticed || is_timeout || row.error->who == plan_.misuse->rank;
  }
  for (const Row& row : simulation_.history()) {
    if (row.error && !is_right(row, *row.error, culprits)) {
      std::string faulty = "; faulty workers";
      for (const int rank : simulation_.faulty_workers()) {
        faulty += " " + std::to_string(rank);
      }
      faulty += ", servers";
      for (const int server : simulation_.faulty_servers()) {
        faulty += " " + std::to_string(server);
      }
      bad("error: " + text_of(row) + faulty);
    }
  }
  if (!noticed) {
    bad("unnoticed: the misuse");
  }
}

bool Checker::is_right(
    const Row& row,
    const Error& error,
    const std::set<int>& culprits) const {
  const auto& workers = simulation_.faulty_workers();
  const auto& servers = simulation_.faulty_servers();
  const auto& wrong = plan_.misuse;
  const bool sync = plan_.mode == Mode::kSync;
  const bool crash = plan_.profile == Profile::kCrash;
  const int who = error.who;
  const bool waits = !error.missing.empty();
  const auto is_wrong_rank = [&](int rank) {
    return wrong && (rank == wrong->rank || culprits.count(rank) != 0);
  };
  if (error.code == ErrorCode::kTimeout) {
    if (row.instruction.timeout != 0) {
      return true; // asked for
    }
    // A lost server, or one that only some have lost, keeps ranks from meeting.
    if (crash && !sync &&
        ((!servers.empty() && waits) || row.instruction.kind == Kind::kClose)) {
      return true;
    }
    return wrong && is_right_misuse(*wrong, error, culprits);
  }
  if (crash && workers.count(row.rank) != 0 &&
      (error.code != ErrorCode::kServerLost || !servers.empty() || sync)) {
    return true;
  }
  switch (error.code) {
    case ErrorCode::kUpdater: // which rounds: see sync_values
      return who == -1 && row.instruction.is_push() && plan_.poison != 0;
    case ErrorCode::kWrite:
      return row.instruction.kind == Instruction::Kind::kSnapshot &&
          error.text == "full" && simulation_.full_disks().count(who) != 0;
    case ErrorCode::kWorkerLost:
      // A server that was cut off takes the others for lost.
      return workers.count(who) != 0 || is_wrong_rank(who) ||
          (!sync && row.instruction.kind == Kind::kInit && !servers.empty());
    case ErrorCode::kServerLost: {
      // Who gives up takes its server along.
      const bool gave_up = wrong && plan_.colocated &&
          (is_wrong_rank(who) ||
           (!sync && simulation_.failed().count(who) != 0));
      if (servers.count(who) == 0 && !gave_up) {
        return false;
      }
      const auto key = row.key();
      if (!error.slice || !key) {
        return true;
      }
      KeySpec spec;
      const int numel = row.instruction.items[0].numel;
      spec.total = numel != 0 ? numel : 9;
      spec.item_bytes = sizeof(Element);
      const auto places = place(
          *key,
          spec,
          plan_.num_servers,
          kSplitElements * static_cast<int64_t>(sizeof(Element)));
      return std::any_of(places.begin(), places.end(), [&](const Place& x) {
        return x.server == who;
      });
    }
    case ErrorCode::kExpired:
    case ErrorCode::kSuperseded:
      return !sync && (workers.count(row.rank) != 0 || servers.count(who) != 0);
    default:
      return wrong && is_right_misuse(*wrong, error, culprits);
  }
}

bool Checker::is_right_misuse(
    const Misuse& wrong,
    const Error& error,
    const std::set<int>& culprits) const {
  const bool skips = wrong.kind == Misuse::Kind::kSkip;
  if (error.code == ErrorCode::kTimeout) {
    // A ring of ranks that wait: one of them names the cause.
    const auto& missing = error.missing;
    return (skips && !culprits.empty()) ||
        std::find(missing.begin(), missing.end(), wrong.rank) !=
        missing.end() ||
        (plan_.mode != Mode::kSync && plan_.colocated && !missing.empty());
  }
  if (error.who != wrong.rank) {
    return false;
  }
  const bool names_key = !error.slice || error.slice->key == wrong.key ||
      error.code == ErrorCode::kLeft;
  switch (wrong.kind) {
    case Misuse::Kind::kShape:
      return error.code == ErrorCode::kShape && names_key;
    case Misuse::Kind::kSkip:
      return (error.code == ErrorCode::kNeverPushed && names_key) ||
          error.code == ErrorCode::kLeft || error.code == ErrorCode::kGroup;
    case Misuse::Kind::kRound:
      return error.code == ErrorCode::kRound && names_key;
    case Misuse::Kind::kConfig:
      return error.code == ErrorCode::kConfig;
    case Misuse::Kind::kEarlyClose:
      return error.code == ErrorCode::kLeft;
  }
  return false;
}

// One version is one value for everybody; for one worker versions never go
// back.
void Checker::versions(size_t store, const Entries& entries) {
  struct Seen {
    const Row* row;
    const Part* part;
  };
  // By job, too: what came after a snapshot may come again with other numbers.
  std::map<std::tuple<int64_t, SliceId, int64_t, int64_t>, uint64_t> known;
  for (const auto& [at, node] : simulation_.servers()) {
    for (const auto& [id, sum] : node->sums) {
      if (at.first == store) {
        const auto& [slice, kid, version] = id;
        known[{simulation_.job(), slice, kid, version}] = sum;
      }
    }
  }
  std::map<std::pair<std::pair<int64_t, int>, SliceId>, std::vector<Seen>> done;
  for (const Entry& entry : entries) {
    if (!entry.has_values()) {
      continue;
    }
    const Row& row = *entry.row;
    for (const Part* part : entry.parts) {
      if (part->is_whole()) {
        const auto [at, is_new] = known.try_emplace(
            std::make_tuple(row.job, part->slice, part->kid, part->version),
            part->sum);
        if (!is_new && at->second != part->sum) {
          bad("diverged: " + text_of(row));
        }
      }
      if (part->version < entry.item->min_version) {
        bad("too old: " + text_of(row));
      }
      done[{{row.job, row.rank}, part->slice}].push_back({&row, part});
    }
  }
  for (const auto& [unused, seen] : done) {
    auto ended = seen;
    std::sort(ended.begin(), ended.end(), [](const Seen& a, const Seen& b) {
      return a.row->end < b.row->end;
    });
    std::pair<int64_t, int64_t> best{0, 0};
    size_t i = 0;
    for (const Seen& next : seen) { // in the order of their begin
      for (; ended[i].row->end < next.row->start; ++i) {
        best = std::max(best, {ended[i].part->kid, ended[i].part->version});
      }
      if (std::make_pair(next.part->kid, next.part->version) < best) {
        bad("backwards: " + text_of(*next.row));
      }
    }
  }
}

// A push is as old as the latest version that its worker had seen, or less.
void Checker::ages(const Entries& entries) {
  // Of a session, by slice: (kid, version) of what has ended.
  struct Ended {
    int64_t end;
    const Part* part;
  };
  std::map<std::tuple<int64_t, int, int64_t, SliceId>, std::vector<Ended>> seen;
  const auto session = [](const Row& row, const SliceId& slice) {
    return std::make_tuple(row.job, row.rank, row.inc, slice);
  };
  for (const Entry& entry : entries) {
    const bool attaches = entry.kind == Kind::kInit && entry.row->succeeded();
    if (attaches || entry.has_values()) {
      for (const Part* part : entry.parts) {
        seen[session(*entry.row, part->slice)].push_back(
            {entry.row->end, part});
      }
    }
  }
  for (const Entry& entry : entries) {
    if (entry.kind != Kind::kPush || !entry.row->succeeded()) {
      continue;
    }
    for (const Part* part : entry.parts) {
      std::pair<int64_t, int64_t> base{0, 0};
      for (const auto& [end, known] : seen[session(*entry.row, part->slice)]) {
        if (end < entry.row->start) {
          base = std::max(base, {known->kid, known->version});
        }
      }
      if (part->age < 0 || part->age > part->version - 1 - base.second) {
        bad("age: " + std::to_string(part->age) + " from version " +
            std::to_string(base.second) + ": " + text_of(*entry.row));
      }
    }
  }
}

} // namespace torchkv::dist::simulation

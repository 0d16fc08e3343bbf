#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <set>

#include "checker.h"

namespace torchkv::dist::simulation {

namespace {

using Kind = Instruction::Kind;

constexpr Time kNever = std::numeric_limits<Time>::infinity();

} // namespace

void Checker::bounds(size_t store, const Entries& entries) {
  const int quorum = plan_.policy.quorum.value();
  const auto& bound = plan_.policy.staleness;
  std::map<std::pair<int, SliceId>, Time> gone; // since when it counts no more
  std::map<int, Time> closed;
  std::set<int> came_back;
  for (const Entry& entry : entries) {
    const Row& row = *entry.row;
    if (entry.kind == Kind::kDelete) {
      gone.try_emplace({row.rank, {entry.item->key, 0}}, row.t0);
    } else if (entry.kind == Kind::kClose) {
      closed[row.rank] = row.t0;
    }
    if (row.inc > 1) {
      came_back.insert(row.rank);
    }
  }
  const auto counts = [&](int rank, const Key& key, Time now) {
    const auto left = gone.find({rank, {key, 0}});
    const auto ended = closed.find(rank);
    return simulation_.faulty_workers().count(rank) == 0 &&
        simulation_.failed().count(rank) == 0 && came_back.count(rank) == 0 &&
        (left == gone.end() || now < left->second) &&
        (ended == closed.end() || now < ended->second);
  };
  // In a barrier; after a fault also until its next push to this key is
  // through, which ends an idleness that a failed barrier may have left behind
  // at its server.
  const auto in_barrier = [&](int rank, Time begin, Time end, const Key& key) {
    for (const Entry& entry : entries) {
      const Row& row = *entry.row;
      if (row.rank != rank || entry.kind != Kind::kBarrier || row.t0 > end) {
        continue;
      }
      Time out = row.t1.value_or(kNever);
      if (row.t1 && plan_.profile == Profile::kCrash) {
        out = kNever;
        for (const Entry& push : entries) {
          const Row& later = *push.row;
          if (later.rank == rank && later.t0 >= *row.t1 && push.is_push() &&
              push.item->key == key && later.succeeded()) {
            out = std::min(out, *later.t1);
          }
        }
      }
      if (out >= begin) {
        return true;
      }
    }
    return false;
  };

  for (const auto& [at, node] : simulation_.servers()) {
    if (at.first != store ||
        simulation_.faulty_servers().count(at.second) != 0) {
      continue;
    }
    std::map<std::pair<SliceId, int64_t>, std::map<int, int64_t>> applied;
    for (const Applied& round : node->trace) {
      const std::string name = round.slice.text();
      const Key& key = round.slice.key;
      const std::set<int> ranks(round.ranks.begin(), round.ranks.end());
      if (ranks.size() != round.ranks.size()) {
        bad("counted twice: " + name);
      }
      auto& clock = applied[{round.slice, round.kid}];
      for (const int rank : ranks) {
        ++clock[rank];
      }
      std::vector<int> alive;
      for (int rank = 0; rank < plan_.num_workers; ++rank) {
        if (counts(rank, key, round.begun) &&
            !in_barrier(rank, round.begun, round.begun, key)) {
          alive.push_back(rank);
        }
      }
      if (round.waited > std::max(plan_.policy.grace + 0.15, 1.15) &&
          simulation_.faulty_servers().empty() &&
          plan_.profile != Profile::kFlaky) {
        bad("grace: " + name + " waited " + std::to_string(round.waited));
      }
      const auto wanted = std::min(static_cast<size_t>(quorum), alive.size());
      if (ranks.size() < wanted && round.waited < 0.99) {
        bad("quorum: " + name + " at " + std::to_string(round.begun));
      }
      if (!bound || round.kid != 1) {
        continue;
      }
      for (const int rank : ranks) {
        for (const int other : alive) {
          const int64_t ahead = clock[rank] - clock[other] - 1;
          if (came_back.count(rank) == 0 && ahead > *bound) {
            bad("stale: " + name + " rank " + std::to_string(rank) +
                " before " + std::to_string(other));
          }
        }
      }
    }
  }

  // What an updater threw away is not in the value.
  if (!bound || plan_.poison != 0) {
    return;
  }
  std::map<std::pair<int, SliceId>, int64_t> own; // pushes
  for (const Entry& entry : entries) {
    const Row& row = *entry.row;
    if (entry.item == nullptr) {
      continue;
    }
    const Key& key = entry.item->key;
    int64_t& count = own[{row.rank, {key, 0}}];
    if (entry.is_push()) { // a list is refused as a whole
      const bool refused =
          row.error && row.error->code == ErrorCode::kServerLost;
      count += refused ? 0 : 1;
    } else if (entry.kind == Kind::kDelete) {
      count = -1000000;
    }
    if (!entry.has_values() || row.inc > 1) {
      continue;
    }
    for (const Part* part : entry.parts) {
      // A server that was cut off may have lost workers that live.
      if (part->kid > 1 ||
          simulation_.faulty_servers().count(part->server) != 0) {
        continue;
      }
      std::map<int, int64_t> seen; // pushes by rank
      for (const auto& [uid, amount] : content(*part, row)) {
        ++seen[uid % plan_.num_workers];
      }
      for (int other = 0; other < plan_.num_workers; ++other) {
        if (counts(other, key, *row.t1) && seen[other] < count - *bound &&
            !in_barrier(other, row.t0, *row.t1, key)) {
          bad("stale: lacks rank " + std::to_string(other) + ": " +
              text_of(row));
        }
      }
    }
  }
}

} // namespace torchkv::dist::simulation

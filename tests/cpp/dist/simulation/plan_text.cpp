#include <sstream>

#include "plan.h"

namespace torchkv::dist::simulation {

const char* name(Mode mode) {
  constexpr std::array<const char*, kNumModes> kNames = {
      "sync", "async", "ssp", "quorum"};
  return kNames.at(static_cast<size_t>(mode));
}

const char* name(Profile profile) {
  constexpr std::array<const char*, kNumProfiles> kNames = {
      "calm", "flaky", "crash", "misuse", "restart"};
  return kNames.at(static_cast<size_t>(profile));
}

const char* name(Instruction::Kind kind) {
  constexpr std::array<const char*, 13> kNames = {
      "nop",
      "init",
      "push",
      "pushpull",
      "pull",
      "delete",
      "config",
      "barrier",
      "snapshot",
      "close",
      "sleep",
      "wait",
      "stop"};
  return kNames.at(static_cast<size_t>(kind));
}

namespace {

const char* name_of(Misuse::Kind kind) {
  constexpr std::array<const char*, 5> kNames = {
      "shape", "skip", "round", "config", "early close"};
  return kNames.at(static_cast<size_t>(kind));
}

void describe(std::ostream& out, const Instruction& instruction) {
  out << " " << name(instruction.kind);
  if (instruction.is_list) {
    out << (instruction.two_phase ? " list in two phases" : " list");
  }
  for (const Item& item : instruction.items) {
    out << " " << item.key;
    if (instruction.kind == Instruction::Kind::kInit) {
      out << "[" << item.numel << (item.whole ? ", whole]" : "]");
    }
    if (item.uid >= 0) {
      out << " #" << item.uid << "*" << item.weight;
    }
    if (item.poison != Poison::kNone) {
      out << " " << text_of(item.poison);
    }
    if (item.stride != 0) {
      out << " every " << item.stride;
    }
    if (item.min_version != 0) {
      out << " from version " << item.min_version;
    }
  }
  if (instruction.rate != 0) {
    out << " " << instruction.rate;
  }
  if (instruction.timeout != 0) {
    out << " within " << instruction.timeout;
  }
  if (instruction.corrupt) {
    out << " of a wrong round";
  }
}

} // namespace

std::string Plan::text() const {
  std::ostringstream out;
  out << "seed " << seed << " " << name(mode) << " " << name(profile) << ": "
      << num_workers << " workers, " << num_servers
      << (colocated ? " colocated" : " dedicated") << " servers";
  if (policy.quorum) {
    out << ", quorum " << *policy.quorum << ", grace " << policy.grace;
  }
  if (policy.staleness) {
    out << ", staleness " << *policy.staleness;
  }
  out << (push_regions ? ", regions" : "") << (leases ? ", leases" : "")
      << (joins ? ", joins" : "") << ", work " << work << ", copy " << copy
      << ", poison " << poison << ", hasty " << hasty << "\n";
  if (misuse) {
    out << "misuse: " << name_of(misuse->kind) << " by rank " << misuse->rank;
    if (misuse->key) {
      out << " of " << *misuse->key;
    }
    out << "\n";
  }
  for (size_t store = 0; store < programs.size(); ++store) {
    for (size_t rank = 0; rank < programs[store].size(); ++rank) {
      out << "store " << store << " rank " << rank << ":";
      for (const Instruction& instruction : programs[store][rank]) {
        if (instruction.kind != Instruction::Kind::kNop) {
          describe(out, instruction);
          out << ";";
        }
      }
      out << "\n";
    }
  }
  return out.str();
}

} // namespace torchkv::dist::simulation

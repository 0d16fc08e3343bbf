#include <sstream>

#include "history.h"
#include "simulation.h"

namespace torchkv::dist::simulation {

namespace {

const char* name_of(ErrorCode code) {
  constexpr std::array<const char*, 14> kNames = {
      "config",
      "shape",
      "unknown",
      "round",
      "group",
      "left",
      "never_pushed",
      "worker_lost",
      "server_lost",
      "expired",
      "superseded",
      "timeout",
      "updater",
      "write"};
  return kNames.at(static_cast<size_t>(code));
}

} // namespace

const char* name(Count count) {
  constexpr std::array<const char*, kNumCounts> kNames = {
      "messages",
      "calls",
      "rejoins",
      "restarts",
      "resumed from a snapshot",
      "rounds",
      "in place",
      "skipped",
      "thrown",
      "in two phases",
      "pushes by region",
      "pulls by lease",
      "stalls",
      "snapshots",
      "files not written",
      "pulls of some elements",
      "rounds of lists"};
  return kNames.at(static_cast<size_t>(count));
}

std::string text_of(const Error& error) {
  std::ostringstream out;
  out << "error " << name_of(error.code) << " " << error.who;
  if (error.slice) {
    out << " " << error.slice->text();
  }
  if (!error.text.empty()) {
    out << " '" << error.text << "'";
  }
  for (const int rank : error.missing) {
    out << " waits for " << rank;
  }
  return out.str();
}

std::string text_of(const Message& message) {
  std::ostringstream out;
  const Header& header = message.header;
  const bool answers = is_answer(message.kind);
  out << "send " << dist::name(message.kind) << " worker " << header.rank << "."
      << header.inc << (answers ? " < " : " > ") << "server " << header.server
      << " store " << header.store << " floor " << header.floor;
  if (is_operation(message.kind) || answers) {
    out << " " << message.slice.text() << " op " << message.opno << " prev "
        << message.prev << " acked " << message.acked << " piece "
        << message.index << "/" << message.pieces << " gen " << message.gen
        << " snap " << message.snap << " round " << message.round << " version "
        << message.version << " kid " << message.kid;
    if (message.count != 1) {
      out << " count " << message.count
          << (message.prevs.empty() ? "" : " prevs");
    }
  }
  if (message.region) {
    out << " region " << message.region->segment;
  }
  for (const auto& [opno, index] : message.got) {
    out << " got " << opno << "[" << index << "]";
  }
  for (const int64_t opno : message.opnos) {
    out << " free " << opno;
  }
  for (const int rank : message.missing) {
    out << " waits for " << rank;
  }
  if (message.error) {
    out << " " << text_of(*message.error);
  }
  return out.str();
}

std::string text_of(const Row& row) {
  std::ostringstream out;
  out << "store " << row.store << " rank " << row.rank << "." << row.inc
      << " job " << row.job << " [" << row.pc << "] " << row.t0 << ".."
      << row.t1.value_or(-1) << " " << simulation::name(row.instruction.kind);
  for (const Item& item : row.instruction.items) {
    out << " " << item.key;
    if (item.uid >= 0) {
      out << "#" << item.uid;
    }
  }
  if (row.error) {
    out << " " << text_of(*row.error);
  }
  for (const Part& part : row.parts) {
    out << " (" << part.slice.text() << " kid " << part.kid << " version "
        << part.version << " round " << part.round;
    if (!part.elements.empty()) {
      out << ":";
      for (const auto& [uid, amount] : contents(part.elements[0])) {
        out << " #" << uid << "*" << amount;
      }
    }
    out << ")";
  }
  return out.str();
}

} // namespace torchkv::dist::simulation

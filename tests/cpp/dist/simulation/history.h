#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "dist/protocol/message.h"
#include "plan.h"

namespace torchkv::dist::simulation {

struct Process;

// What a pull asks for: elements of a slice of so many.
struct Asked {
  std::vector<int64_t> elements;
  int64_t length = 0;
};

// What a call has brought for one slice.
struct Part {
  SliceId slice;
  int server = 0;
  Elements elements; // of a pull
  Asked asked; // which ones these are
  uint64_t sum = 0; // checksum of them
  int64_t version = 0;
  int64_t kid = 0;
  int64_t round = 0;
  int64_t age = 0;

  bool is_whole() const {
    return static_cast<int64_t>(elements.size()) == asked.length;
  }
};

// One call in the history.
struct Row {
  size_t store = 0;
  int rank = 0;
  int64_t inc = 0;
  int64_t job = 0;
  int64_t pc = -1; // in the program; -1: what a worker does that comes back
  Instruction instruction;
  Time t0 = 0;
  int64_t start = 0; // order of events
  Time paused = 0;
  const Process* process = nullptr; // null: of a job that has ended
  std::optional<Time> t1;
  int64_t end = 0;
  std::optional<Error> error;
  std::vector<Part> parts;
  std::map<SliceId, Asked> asked; // where these are not all elements
  std::vector<SliceListPtr> lists; // that the call has named

  // Of a call on one key.
  std::optional<Key> key() const {
    if (instruction.is_list || instruction.items.empty()) {
      return std::nullopt;
    }
    return instruction.items[0].key;
  }
  bool succeeded() const {
    return t1 && !error;
  }
};

// One update, for the checker.
struct Applied {
  Time begun = 0;
  SliceId slice;
  int64_t kid = 0;
  std::vector<int> ranks;
  Time waited = 0;
};

std::string text_of(const Error& error);
std::string text_of(const Message& message);
std::string text_of(const Row& row);

} // namespace torchkv::dist::simulation

#include "gather_round.h"

#include <c10/util/StringUtil.h>

#include <chrono>
#include <exception>
#include <sstream>
#include <thread>
#include <utility>

#include "../core/errors.h"
#include "../core/signals.h"
#include "errors.h"
#include "node.h"

namespace torchkv::dist {
namespace {

constexpr auto kPause = std::chrono::milliseconds(5);
constexpr size_t kNumbersPerRank = 4; // of a Begun

} // namespace

// Each rank numbers its attempts. Rank 0 makes a plan of one attempt of every
// rank, none of which has been in a plan before; a rank whose attempt is in it
// takes part. If one gives up, the others do, too, as they wait in vain, and
// all need another attempt.
GatherRound::GatherRound(
    const char* op,
    std::shared_ptr<Rendezvous> rendezvous,
    std::string prefix,
    const Ranks& ranks,
    const Contribution& own,
    Check check)
    : op_(op),
      rendezvous_(std::move(rendezvous)),
      prefix_(std::move(prefix)),
      ranks_(ranks),
      own_(own),
      check_(std::move(check)) {
  do {
    begin();
  } while (!is_at_first_stage());
}

// Whether all ranks are at this one's stage, and not some at a later one.
bool GatherRound::is_at_first_stage() const {
  bool is_same = true;
  for (size_t rank = 0; rank < contributions_.size(); ++rank) {
    const int64_t stage = contributions_[rank].stage;
    if (stage < own_.stage) {
      throw RemoteError(
          {__func__, __FILE__, __LINE__},
          c10::str(
              op_,
              ": rank ",
              rank,
              " has left an earlier call with an error and begun again; repeat "
              "the call"));
    }
    is_same = is_same && stage == own_.stage;
  }
  return is_same;
}

void GatherRound::begin() {
  const int64_t attempt = rendezvous_->add(key("attempts", ranks_.rank), 1);
  const std::string begun = key("begun", ranks_.rank);
  rendezvous_->set(begun, text_of({attempt, own_}));
  try {
    take_part(attempt);
  } catch (...) {
    try {
      rendezvous_->set(begun, text_of({}));
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch)
      // The first error counts.
    }
    throw;
  }
}

void GatherRound::take_part(int64_t attempt) {
  if (ranks_.rank == 0) {
    make_plan();
  }
  std::vector<Begun> agreed;
  wait([&] {
    agreed = plan();
    const bool takes_part = !agreed.empty() &&
        agreed[static_cast<size_t>(ranks_.rank)].attempt == attempt;
    std::vector<int32_t> missing;
    if (!takes_part) {
      for (int32_t rank = 0; rank < ranks_.num_ranks; ++rank) {
        if (begun(rank).attempt == 0) {
          missing.push_back(rank);
        }
      }
      if (missing.empty()) { // rank 0 has not seen all of them yet
        missing.push_back(0);
      }
    }
    return missing;
  });
  number_ = agreed[0].attempt;
  contributions_.clear();
  for (const Begun& each : agreed) {
    contributions_.push_back(each.contribution);
  }
}

// Rank 0's part.
void GatherRound::make_plan() {
  std::vector<Begun> last = plan();
  last.resize(static_cast<size_t>(ranks_.num_ranks));
  std::string text;
  wait([&] {
    std::vector<int32_t> missing;
    text.clear();
    for (int32_t rank = 0; rank < ranks_.num_ranks; ++rank) {
      const Begun next = begun(rank);
      if (next.attempt <= last[static_cast<size_t>(rank)].attempt) {
        missing.push_back(rank);
      }
      text += text_of(next) + ' ';
    }
    return missing;
  });
  rendezvous_->set(prefix_ + "plan", text);
}

void GatherRound::meet() {
  rendezvous_->set(key("met", ranks_.rank), std::to_string(number_));
  wait([&] {
    std::vector<int32_t> missing;
    for (int32_t rank = 0; rank < ranks_.num_ranks; ++rank) {
      // No rank is in a later round before this one has left.
      if (numbers_of(key("met", rank)) != std::vector<int64_t>{number_}) {
        missing.push_back(rank);
      }
    }
    return missing;
  });
}

// Until no rank is missing.
void GatherRound::wait(
    c10::function_ref<std::vector<int32_t>()> missing) const {
  const Time end = Node::now() + ranks_.timeout;
  Error error;
  error.code = ErrorCode::kTimeout;
  while (true) {
    error.missing = missing();
    if (error.missing.empty()) {
      return;
    }
    if (Node::now() >= end) {
      throw_error(op_, error, ranks_.rank, ranks_.timeout);
    }
    try {
      check_();
    } catch (...) {
      if (missing().empty()) { // what has failed since is not of this round
        return;
      }
      throw;
    }
    check_signals();
    std::this_thread::sleep_for(kPause);
  }
}

std::string GatherRound::key(const char* name, int32_t rank) const {
  return c10::str(prefix_, name, '/', rank);
}

// Of a value that lists them; none if it is not set.
std::vector<int64_t> GatherRound::numbers_of(const std::string& key) const {
  std::istringstream text(rendezvous_->get(key, 0).value_or(""));
  std::vector<int64_t> numbers;
  for (int64_t number = 0; text >> number;) {
    numbers.push_back(number);
  }
  return numbers;
}

std::string GatherRound::text_of(const Begun& begun) {
  const Contribution& own = begun.contribution;
  return c10::str(
      begun.attempt,
      ' ',
      own.stage,
      ' ',
      own.num_bytes,
      ' ',
      static_cast<int>(own.has_store));
}

// What text_of() has made of each, one after the other.
std::vector<GatherRound::Begun> GatherRound::begun_in(
    const std::string& key) const {
  const auto numbers = numbers_of(key);
  std::vector<Begun> result;
  result.reserve(numbers.size() / kNumbersPerRank);
  for (size_t i = 0; i + kNumbersPerRank <= numbers.size();
       i += kNumbersPerRank) {
    result.push_back(
        {numbers[i], {numbers[i + 1], numbers[i + 2], numbers[i + 3] != 0}});
  }
  return result;
}

GatherRound::Begun GatherRound::begun(int32_t rank) const {
  const auto one = begun_in(key("begun", rank));
  return one.empty() ? Begun() : one[0];
}

// The latest; empty: none yet.
std::vector<GatherRound::Begun> GatherRound::plan() const {
  return begun_in(prefix_ + "plan");
}

} // namespace torchkv::dist

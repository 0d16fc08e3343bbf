#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../store/options.h"
#include "protocol/config.h"

namespace torchkv::dist {

// What the ranks of a job tell each other through the rendezvous before they
// are connected.
class Exchange {
 public:
  // `prefix` of its keys. All waiting ends `timeout` seconds from now.
  Exchange(
      std::shared_ptr<Rendezvous> rendezvous,
      std::string prefix,
      int32_t rank,
      int32_t num_ranks,
      double timeout);

  // Sets this rank's value for `name`. Does not wait.
  void say(const char* name, const std::string& own);
  // The same, and waits for those of all ranks; StoreTimeoutError names the
  // ranks without one.
  std::vector<std::string> all(const char* name, const std::string& own);

  // To be called by every rank, when one has seen that the values do not go
  // together. The values that have been said are not read again, should the
  // ranks repeat what they did.
  void refuse();

 private:
  std::string key(const char* name, int32_t rank) const;

  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::string prefix_;
  const int32_t rank_;
  const int32_t num_ranks_;
  const double timeout_;
  const Time end_;
  const int64_t attempt_; // how often this rank has refused
};

} // namespace torchkv::dist

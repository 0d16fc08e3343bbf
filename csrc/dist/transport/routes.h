#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../../core/export.h"
#include "../protocol/config.h"

namespace torchkv::dist {

// Which connection leads to a worker: one that its requests come from. An
// incarnation has its own, so that an answer to a process that another has
// replaced does not go to the other. A connection is known by the identity that
// the socket has given it, which no other one ever has.
//
// A connection keeps its route while it is heard from, so that who repeats
// recorded frames over another one does not take the worker's answers; a worker
// that has connected again gets it once the connection before is silent.
class TORCHKV_API Routes {
 public:
  // A request has come.
  void heard(
      int32_t rank,
      int64_t incarnation,
      std::string_view identity,
      Time now);
  // Null if there is none. Valid until the next call.
  const std::string* find(int32_t rank, int64_t incarnation) const;
  // The connection is gone. What it has sent may still come.
  void erase(int32_t rank, int64_t incarnation);

 private:
  // Of the highest incarnations of a rank.
  static constexpr size_t kMaxIncarnations = 4;
  static constexpr size_t kMaxGone = 8;
  // Workers that wait for nothing are heard once a second, by default.
  static constexpr Time kSilence = 1.5;
  struct Route {
    std::string identity; // empty: gone
    Time heard = 0;
    std::vector<std::string> gone; // the latest, oldest first
  };
  std::map<int32_t, std::map<int64_t, Route>> routes_;
};

} // namespace torchkv::dist

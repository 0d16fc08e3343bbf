#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "../../core/export.h"

namespace torchkv::dist {

// Which connection leads to a worker: the one that its latest request came
// from. An incarnation has its own, so that an answer to a process that another
// has replaced does not go to the other. A connection is known by the identity
// that the socket has given it, which no other one ever has.
class TORCHKV_API Routes {
 public:
  // A request has come. A late one, from a connection that the process has
  // replaced, changes nothing.
  void heard(int32_t rank, int64_t incarnation, std::string_view identity);
  // Null if there is none. Valid until the next call.
  const std::string* find(int32_t rank, int64_t incarnation) const;
  // The connection is gone.
  void erase(int32_t rank, int64_t incarnation);

 private:
  // Of the highest incarnations of a rank.
  static constexpr size_t kMaxIncarnations = 4;
  static constexpr size_t kMaxReplaced = 8;
  struct Route {
    std::string identity; // empty: gone
    std::vector<std::string> replaced; // the latest, oldest first
  };
  std::map<int32_t, std::map<int64_t, Route>> routes_;
};

} // namespace torchkv::dist

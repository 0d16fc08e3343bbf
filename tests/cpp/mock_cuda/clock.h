#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchkv::mock_cuda {

// The host or a stream, as a small number.
using Actor = size_t;
constexpr Actor kHost = 0;

// A vector clock: for each actor, up to which of its works all are known to be
// done.
class Clock {
 public:
  // Adds a work of `actor` and returns its number.
  uint64_t tick(Actor actor);
  void join(const Clock& other);
  bool covers(Actor actor, uint64_t number) const;
  bool covers(const Clock& other) const;

 private:
  std::vector<uint64_t> numbers_;
};

// One work: an operator, a launch, a copy, or an access by the host.
struct Work {
  std::string text() const; // "aten::add_ on stream 3 of cuda:1"

  std::string name;
  std::string where;
  Actor actor = kHost;
  uint64_t number = 0;
};

} // namespace torchkv::mock_cuda

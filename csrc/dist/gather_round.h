#pragma once

#include <c10/macros/Macros.h>
#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../store/options.h"

namespace torchkv::dist {

// One gathering: the ranks agree through the rendezvous that they all take part
// in the same one. What each may rely on elsewhere, that calls are made equally
// often, does not hold after a call that some ranks have left with an error.
class TORCHKV_API GatherRound {
 public:
  // What a rank tells the others as it begins.
  struct Contribution {
    int64_t stage = 0; // of a call with several rounds
    int64_t num_bytes = 0;
    bool has_store = false; // where the bytes can be put
  };
  struct Ranks {
    int32_t rank = 0;
    int32_t num_ranks = 1;
    double timeout = 0; // in seconds, of the constructor and of meet() each
  };
  // Throws where waiting is in vain: called often, in a round as well. What it
  // throws does not count once there is nothing to wait for.
  using Check = std::function<void()>;

  // Waits until all ranks begin one; StoreTimeoutError names those that do not.
  // RemoteError if one is at an earlier stage: after an error it has begun its
  // call again, and waits there for the others to do so, too. `prefix` of its
  // keys in the rendezvous.
  GatherRound(
      const char* op,
      std::shared_ptr<Rendezvous> rendezvous,
      std::string prefix,
      const Ranks& ranks,
      const Contribution& own,
      Check check);
  C10_DISABLE_COPY_AND_ASSIGN(GatherRound);

  // The same on all ranks, and of no other round. From 1.
  int64_t number() const {
    return number_;
  }
  // Of each rank.
  const std::vector<Contribution>& contributions() const {
    return contributions_;
  }
  // Waits until all ranks call it, once, or have left with an error;
  // StoreTimeoutError names the ranks that do not.
  void meet();

 private:
  struct Begun {
    int64_t attempt = 0; // 0: none, or given up
    Contribution contribution;
  };
  bool is_at_first_stage() const;
  static std::string text_of(const Begun& begun);
  std::string key(const char* name, int32_t rank) const;
  std::vector<int64_t> numbers_of(const std::string& key) const;
  std::vector<Begun> begun_in(const std::string& key) const;
  Begun begun(int32_t rank) const;
  std::vector<Begun> plan() const;
  void begin();
  void take_part(int64_t attempt);
  void make_plan();
  void wait(c10::function_ref<std::vector<int32_t>()> missing) const;

  const char* const op_;
  const std::shared_ptr<Rendezvous> rendezvous_;
  const std::string prefix_;
  const Ranks ranks_;
  const Contribution own_;
  const Check check_;
  int64_t number_ = 0;
  std::vector<Contribution> contributions_;
};

} // namespace torchkv::dist

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "../update/updater.h"
#include "protocol/round.h"
#include "update_spec.h"

namespace torchkv::dist {

// What the options of rounds stand for on this rank. Used by one thread at a
// time, but for set_python().
class Updates {
 public:
  struct Update {
    Updater updater;
    bool replaces = false; // the first push becomes the value, without it
  };

  explicit Updates(int64_t rank) : rank_(rank) {}
  C10_DISABLE_COPY_AND_ASSIGN(Updates);

  int64_t rank() const {
    return rank_;
  }

  // RuntimeError if this rank cannot run it.
  Update of(const Round& round);
  // Whether of() has been called for the generation, and it is a built-in rule.
  bool is_known_rule(int64_t gen) const;

  // The TorchScript updater of an epoch, with its state; null if none of its
  // updates has been made.
  std::shared_ptr<OpaqueUpdater> script(int64_t epoch) const;
  // What of() then takes for the epoch, instead of the one in the options.
  void set_script(int64_t epoch, std::shared_ptr<OpaqueUpdater> script);
  // NotImplementedError if the latest TorchScript updater is not as the options
  // have it: then it keeps a state, of all keys together.
  void check_script_is_stateless() const;

  // What UpdateSpec::Kind::kPython of this epoch stands for on this rank. Any
  // thread.
  TORCHKV_API void set_python(
      int64_t epoch,
      std::shared_ptr<OpaqueUpdater> updater);
  // Frees the Python updaters of epochs before this one. REQUIRES: no round of
  // theirs is to come.
  void forget_python(int64_t before);
  // Whether there is one of such an epoch. Any thread.
  bool has_python(int64_t before) const;

 private:
  struct Known {
    Update update;
    int64_t epoch = 0;
  };
  Known read(const Blob& options);

  const int64_t rank_;
  std::map<int64_t, Known> known_; // by generation
  std::shared_ptr<OpaqueUpdater> script_; // the latest
  int64_t script_epoch_ = 0;
  at::Tensor script_archive_; // of the options; undefined before its updates

  mutable std::mutex mutex_; // guards the rest
  std::map<int64_t, std::shared_ptr<OpaqueUpdater>> python_; // by epoch
};

} // namespace torchkv::dist

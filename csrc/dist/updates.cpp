#include "updates.h"

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <utility>
#include <variant>

#include "../update/script_updater.h"

namespace torchkv::dist {

Updates::Update Updates::of(const Round& round) {
  const auto found = known_.find(round.gen);
  if (found != known_.end()) {
    return found->second;
  }
  const UpdateSpec spec = decode_update_spec(round.options);
  Update update;
  Updater& updater = update.updater;
  switch (spec.kind) {
    case UpdateSpec::Kind::kAssign:
      break;
    case UpdateSpec::Kind::kReplace:
      update.replaces = true;
      break;
    case UpdateSpec::Kind::kOptimizer:
      updater = spec.optimizer;
      break;
    case UpdateSpec::Kind::kScript:
      // Its own state outlives assign, which ends with the same updater.
      if (script_ == nullptr || script_epoch_ != spec.epoch) {
        set_script(spec.epoch, ScriptUpdater::load(spec.archive));
      }
      script_archive_ = spec.archive;
      updater = script_;
      break;
    case UpdateSpec::Kind::kPython: {
      const std::lock_guard lock(mutex_);
      const auto set = python_.find(spec.epoch);
      TORCH_CHECK(
          set != python_.end() && set->second != nullptr,
          "expected a Python updater on every rank, but rank ",
          rank_,
          " has not called set_updater");
      updater = set->second;
    }
  }
  // Generations of a key never go back, but those of two keys may cross.
  constexpr size_t kMaxKept = 64;
  if (known_.size() >= kMaxKept) {
    known_.erase(known_.begin());
  }
  known_[round.gen] = update;
  return update;
}

bool Updates::is_known_rule(int64_t gen) const {
  const auto update = known_.find(gen);
  return update != known_.end() &&
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(
             update->second.updater);
}

std::shared_ptr<OpaqueUpdater> Updates::script(int64_t epoch) const {
  return script_epoch_ == epoch ? script_ : nullptr;
}

void Updates::set_script(int64_t epoch, std::shared_ptr<OpaqueUpdater> script) {
  script_ = std::move(script);
  script_epoch_ = epoch;
  script_archive_.reset();
}

void Updates::check_script_is_stateless() const {
  if (script_ == nullptr || !script_archive_.defined()) {
    return;
  }
  const auto as_set = ScriptUpdater::load(script_archive_);
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::equal(serialize_updater(*script_), serialize_updater(*as_set)),
      "expected an updater without a state of its own, but got a TorchScript "
      "module that has changed its attributes; save() and state_dict() keep "
      "them");
}

void Updates::set_python(
    int64_t epoch,
    std::shared_ptr<OpaqueUpdater> updater) {
  const std::lock_guard lock(mutex_);
  python_[epoch] = std::move(updater);
}

} // namespace torchkv::dist

#include "updates.h"

#include <ATen/ops/equal.h>
#include <c10/util/Exception.h>

#include <iterator>
#include <utility>
#include <variant>

#include "../update/script_updater.h"

namespace torchkv::dist {

Updates::Update Updates::of(const Round& round) {
  // Generations of a key never go back, but those of two keys may cross.
  constexpr size_t kMaxKept = 64;
  auto found = known_.find(round.gen);
  if (found == known_.end()) {
    Known known = read(round.options);
    if (known_.size() >= kMaxKept) {
      known_.erase(known_.begin());
    }
    found = known_.emplace(round.gen, std::move(known)).first;
  }
  Update update = found->second.update;
  // In dist_async, another rank may know the generation and push a gradient.
  update.replaces = update.replaces && round.pushes[0].rank == 0;
  return update;
}

Updates::Known Updates::read(const Blob& options) {
  const UpdateSpec spec = decode_update_spec(options);
  Known known;
  known.epoch = spec.epoch;
  known.update.replaces = spec.replaces;
  Updater& updater = known.update.updater;
  switch (spec.kind) {
    case UpdateSpec::Kind::kAssign:
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
  return known;
}

bool Updates::is_known_rule(int64_t gen) const {
  const auto update = known_.find(gen);
  return update != known_.end() &&
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(
             update->second.update.updater);
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
  python_[epoch].swap(updater); // an old one is freed after the lock
}

void Updates::forget_python(int64_t before) {
  decltype(python_) freed; // without the mutex: it takes the GIL
  {
    const std::lock_guard lock(mutex_);
    while (!python_.empty() && python_.begin()->first < before) {
      freed.insert(python_.extract(python_.begin()));
    }
  }
  for (auto it = known_.begin(); it != known_.end();) {
    it = freed.count(it->second.epoch) != 0 ? known_.erase(it) : std::next(it);
  }
}

bool Updates::has_python(int64_t before) const {
  const std::lock_guard lock(mutex_);
  return !python_.empty() && python_.begin()->first < before;
}

} // namespace torchkv::dist

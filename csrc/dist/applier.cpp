#include "applier.h"

#include <algorithm>
#include <utility>

#include "../core/in_progress.h"
#include "../update/script_updater.h"
#include "errors.h"

namespace torchkv::dist {
namespace {

std::vector<int64_t> sizes_of(const Round& round) {
  return round.num_elements == round.spec->total
      ? round.spec->sizes
      : std::vector<int64_t>{round.num_elements};
}

} // namespace

Applier::Applier(
    Runtime& runtime,
    const Store* owner,
    int64_t rank,
    size_t piece_bytes,
    Done done)
    : runtime_(runtime),
      owner_(owner),
      rank_(rank),
      piece_bytes_(piece_bytes),
      done_(std::move(done)),
      store_(runtime_, LocalStore::Options()) {}

Applier::~Applier() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
}

void Applier::enqueue(Job job) {
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { loop(); });
    }
  }
  wake_.notify_one();
}

void Applier::apply(RoundPtr round) {
  enqueue(std::move(round));
}

void Applier::measure(RoundPtr round) {
  enqueue(Measured{std::move(round)});
}

void Applier::erase(const SliceId& slice, int64_t kid) {
  enqueue(Erased{slice, kid});
}

void Applier::complete(Shard shard, std::function<void(Shard)> done) {
  auto shared = std::make_shared<Shard>(std::move(shard));
  enqueue([this, shared, done = std::move(done)] {
    for (const auto& [slice, shot] : shared->slices) {
      const auto held = held_.find(slice.key);
      auto* stored = dynamic_cast<StoredValue*>(shot->value.get());
      // Without one, the value is still the current one.
      if (stored != nullptr && !stored->state && held != held_.end() &&
          held->second.kid == shot->kid) {
        stored->state = store_.state_of(slice.key, held->second.updater);
      }
    }
    done(std::move(*shared));
  });
}

void Applier::set_python_updater(
    int64_t epoch,
    std::shared_ptr<OpaqueUpdater> updater) {
  const std::lock_guard lock(mutex_);
  python_[epoch] = std::move(updater);
}

void Applier::loop() {
  std::vector<Job> jobs;
  std::vector<RoundPtr> rounds;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) {
        return;
      }
      jobs.clear();
      jobs.swap(jobs_);
    }
    for (auto& job : jobs) {
      if (auto* round = std::get_if<RoundPtr>(&job)) {
        rounds.push_back(std::move(*round));
        continue;
      }
      apply_all(std::exchange(rounds, {}));
      if (const auto* erased = std::get_if<Erased>(&job)) {
        forget(*erased);
      } else if (const auto* measured = std::get_if<Measured>(&job)) {
        measure_one(measured->round);
      } else {
        std::get<std::function<void()>>(job)();
      }
    }
    jobs.clear();
    apply_all(std::exchange(rounds, {}));
  }
}

// Rounds of one generation of a built-in rule are one call of the store.
void Applier::apply_all(const std::vector<RoundPtr>& rounds) {
  std::vector<Finished> finished;
  for (size_t begin = 0; begin < rounds.size();) {
    size_t end = begin + 1;
    std::optional<std::string> error;
    try {
      const Updater updater = updater_of(*rounds[begin]);
      if (!std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(updater)) {
        while (end < rounds.size() && rounds[end]->gen == rounds[begin]->gen &&
               rounds[end]->factor == rounds[begin]->factor &&
               !rounds[end]->group == !rounds[begin]->group) {
          ++end;
        }
      }
      error = apply_batch(
          c10::ArrayRef<RoundPtr>(rounds).slice(begin, end - begin), updater);
    } catch (const std::exception& caught) {
      error = describe(caught);
    } catch (...) {
      error = "an exception of an unknown type";
    }
    for (; begin < end; ++begin) {
      if (rounds[begin]->result == nullptr) { // failed before the update
        rounds[begin]->result = rounds[begin]->source;
      }
      finished.push_back({rounds[begin], error, /*is_measured=*/false});
    }
  }
  if (!finished.empty()) {
    done_(finished);
  }
}

// Puts the value that init, or a snapshot, has brought into the store.
void Applier::prepare(const Round& round, const Updater& updater) {
  const Key& key = round.slice.key;
  const auto found = held_.find(key);
  if (found != held_.end() && found->second.kid == round.kid) {
    found->second.updater = updater;
    return;
  }
  if (found != held_.end()) {
    store_.erase(key);
    held_.erase(found);
  }
  const Tensors value(tensor_of(
      round.source->pieces,
      sizes_of(round),
      static_cast<c10::ScalarType>(round.spec->dtype),
      buffers_));
  store_.insert({"init", key, &value});
  held_[key] = {round.kid, updater};
  const auto* restored = dynamic_cast<const StoredValue*>(round.source.get());
  if (restored != nullptr && restored->state) {
    store_.set_state_of(key, updater, *restored->state);
  }
}

// Before the state of a value that a snapshot refers to is written.
void Applier::keep_state(const Round& round) {
  auto* stored = dynamic_cast<StoredValue*>(round.source.get());
  const auto held = held_.find(round.slice.key);
  if (round.in_snapshot && stored != nullptr && !stored->state &&
      held != held_.end() && held->second.kid == round.kid) {
    stored->state = store_.state_of(round.slice.key, held->second.updater);
  }
}

void Applier::append_values(
    const Round& round,
    Keys& keys,
    Tensors& values) const {
  keys.single = false;
  keys.list.push_back(round.slice.key);
  for (const auto& push : round.pushes) {
    values.append(tensor_of(
        push.pieces,
        sizes_of(round),
        static_cast<c10::ScalarType>(push.dtype),
        buffers_));
  }
  values.end_group();
}

void Applier::measure_one(const RoundPtr& round) {
  Keys keys;
  Tensors values;
  try {
    const Updater updater = updater_of(*round);
    prepare(*round, updater);
    append_values(*round, keys, values);
    round->partial = store_.measure({"push", keys, &values}, updater);
  } catch (const std::exception&) {
    // apply() will meet the same error, and report it.
    round->partial = 0;
  }
  done_({{round, std::nullopt, /*is_measured=*/true}});
}

std::optional<std::string> Applier::apply_batch(
    c10::ArrayRef<RoundPtr> rounds,
    const Updater& updater) {
  Keys keys;
  Tensors values;
  for (const auto& round : rounds) {
    keep_state(*round);
    prepare(*round, updater);
    append_values(*round, keys, values);
    round->source.reset(); // or the value would not be written in place
  }
  std::optional<std::string> error;
  try {
    const InProgress<Store> updating(owner_);
    const Call call{"push", keys, &values};
    if (rounds[0]->group) {
      store_.apply(call, updater, rounds[0]->factor);
    } else {
      store_.apply(call, updater);
    }
  } catch (const std::exception& caught) {
    error = describe(caught);
  } catch (...) {
    error = "an exception of an unknown type";
  }
  for (const auto& round : rounds) {
    auto result = std::make_shared<StoredValue>();
    result->pieces =
        cut(blob_of(store_.lease(round->slice.key).first), piece_bytes_);
    round->result = std::move(result);
  }
  return error;
}

Updater Applier::updater_of(const Round& round) {
  const auto found = updaters_.find(round.gen);
  if (found != updaters_.end()) {
    return found->second;
  }
  const UpdateSpec spec = decode_update_spec(round.options);
  Updater updater;
  switch (spec.kind) {
    case UpdateSpec::Kind::kAssign:
      break;
    case UpdateSpec::Kind::kOptimizer:
      updater = spec.optimizer;
      break;
    case UpdateSpec::Kind::kScript:
      updater = std::static_pointer_cast<OpaqueUpdater>(
          ScriptUpdater::load(spec.archive));
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
  if (updaters_.size() >= kMaxKept) {
    updaters_.erase(updaters_.begin());
  }
  updaters_[round.gen] = updater;
  return updater;
}

void Applier::forget(const Erased& erased) {
  const auto held = held_.find(erased.slice.key);
  if (held != held_.end() && held->second.kid == erased.kid) {
    store_.erase(erased.slice.key);
    held_.erase(held);
  }
}

} // namespace torchkv::dist

#include "applier.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <utility>

#include "../core/in_progress.h"
#include "../core/signals.h"
#include "byte_counts.h"
#include "encoded_pushes.h"
#include "errors.h"
#include "within.h"

namespace torchkv::dist {
namespace {

// Whether the round is one of values; join_encoded(), with false instead of an
// error.
bool can_join(Round& round, const Config& config, const Buffers& buffers) {
  try {
    join_encoded(round, SliceShape(round, config), buffers);
    return !forgets_rows(round);
  } catch (const c10::Error&) {
    return false;
  }
}

} // namespace

Applier::Applier(
    Runtime& runtime,
    const Store* owner,
    int64_t rank,
    const Config& config,
    Buffers buffers,
    Done done)
    : runtime_(runtime),
      owner_(owner),
      config_(config),
      done_(std::move(done)),
      buffers_(std::move(buffers)),
      store_(runtime_, store_options(buffers_)),
      updates_(rank) {}

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

std::shared_ptr<OpaqueUpdater> Applier::script(
    const char* op,
    int64_t epoch,
    double timeout) {
  // Shared, so that it is broken if the applier ends.
  auto done = std::make_shared<std::promise<std::shared_ptr<OpaqueUpdater>>>();
  auto result = done->get_future();
  enqueue([this, epoch, done = std::exchange(done, nullptr)] {
    done->set_value(updates_.script(epoch));
  });
  return get_within(result, op, updates_.rank(), timeout);
}

void Applier::set_script(int64_t epoch, std::shared_ptr<OpaqueUpdater> script) {
  enqueue([this, epoch, script = std::move(script)] {
    updates_.set_script(epoch, script);
  });
}

void Applier::forget_python(int64_t before) {
  if (updates_.has_python(before)) {
    enqueue([this, before] { updates_.forget_python(before); });
  }
}

void Applier::drain(double timeout) {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> longest(timeout);
  const auto begin = Clock::now();
  std::unique_lock lock(mutex_);
  while (!idle_.wait_for(lock, kSignalPeriod, [this] {
    return !busy_ && jobs_.empty();
  }) && Clock::now() - begin < longest) {
    lock.unlock();
    check_signals();
    lock.lock();
  }
}

bool Applier::is_idle() {
  const std::lock_guard lock(mutex_);
  return !busy_ && jobs_.empty();
}

std::optional<std::vector<Applier::Finished>> Applier::apply_now(
    const std::vector<RoundPtr>& rounds) {
  {
    const std::lock_guard lock(mutex_);
    if (busy_ || !jobs_.empty()) {
      return std::nullopt;
    }
    busy_ = true;
  }
  const auto done = c10::make_scope_exit([this] {
    const std::lock_guard lock(mutex_);
    busy_ = false;
    if (!jobs_.empty()) {
      wake_.notify_one();
    } else {
      idle_.notify_all();
    }
  });
  return is_short(rounds) ? std::optional(apply_all(rounds)) : std::nullopt;
}

// Whether they are of a built-in rule that is known, on little memory.
bool Applier::is_short(const std::vector<RoundPtr>& rounds) const {
  constexpr size_t kMaxRounds = 16;
  size_t num_rounds = 0;
  constexpr int64_t kMaxElements = 4096; // of all values
  int64_t num_elements = 0;
  for (const auto& round : rounds) {
    if (!updates_.is_known_rule(round->gen) || round->spec->is_row_sparse()) {
      return false;
    }
    num_rounds += round->parts ? round->parts->size() : 1;
    num_elements +=
        round->num_elements * static_cast<int64_t>(1 + round->pushes.size());
  }
  return num_rounds <= kMaxRounds && num_elements <= kMaxElements;
}

void Applier::loop() {
  std::vector<Job> jobs;
  std::vector<RoundPtr> rounds;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      wake_.wait(
          lock, [this] { return !busy_ && (stopping_ || !jobs_.empty()); });
      if (jobs_.empty()) {
        return;
      }
      busy_ = true;
      jobs.clear();
      jobs.swap(jobs_);
    }
    for (auto& job : jobs) {
      if (auto* round = std::get_if<RoundPtr>(&job)) {
        rounds.push_back(std::move(*round));
        continue;
      }
      finish(apply_all(std::exchange(rounds, {})));
      if (const auto* erased = std::get_if<Erased>(&job)) {
        forget(*erased);
      } else if (const auto* measured = std::get_if<Measured>(&job)) {
        measure_one(measured->round);
      } else {
        run(std::get<std::function<void()>>(job));
      }
    }
    jobs.clear();
    finish(apply_all(std::exchange(rounds, {})));
    {
      const std::lock_guard lock(mutex_);
      busy_ = false;
    }
    idle_.notify_all();
  }
}

void Applier::run(const std::function<void()>& function) {
  try {
    function();
  } catch (const std::exception& error) {
    TORCH_WARN("torchkv: ", describe(error));
  }
}

void Applier::finish(const std::vector<Finished>& finished) const {
  if (!finished.empty()) {
    done_(finished);
  }
}

// Rounds of one generation of a built-in rule are one call of the store.
std::vector<Applier::Finished> Applier::apply_all(
    const std::vector<RoundPtr>& rounds) {
  std::vector<Finished> finished;
  for (size_t begin = 0; begin < rounds.size();) {
    size_t end = begin + 1;
    std::optional<std::string> thrown; // by the updater
    const auto failed = error_of([&] {
      Round& first = *rounds[begin];
      const Updates::Update update = updates_.of(first);
      if (!first.parts) { // one with a payload that is not one fails alone
        join_encoded(first, SliceShape(first, config_), buffers_);
      }
      const bool forgets = forgets_rows(first);
      if (!first.parts && !forgets &&
          !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(
              update.updater)) {
        while (end < rounds.size() && !rounds[end]->parts &&
               rounds[end]->gen == rounds[begin]->gen &&
               updates_.of(*rounds[end]).replaces == update.replaces &&
               rounds[end]->factor == rounds[begin]->factor &&
               !rounds[end]->group == !rounds[begin]->group &&
               can_join(*rounds[end], config_, buffers_)) {
          ++end;
        }
      }
      const auto batch =
          c10::ArrayRef<RoundPtr>(rounds).slice(begin, end - begin);
      thrown = first.parts ? apply_list(first, update)
          : forgets        ? forget_rows(first, update)
                           : apply_batch(batch, update);
    });
    const auto& error = failed ? failed : thrown;
    for (; begin < end; ++begin) {
      if (rounds[begin]->result == nullptr) { // failed before the update
        rounds[begin]->result = rounds[begin]->source;
      }
      // Before the workers hear of the update: their next pushes may be written
      // where these are.
      for (auto& push : rounds[begin]->pushes) {
        push.pieces.clear();
      }
      finished.push_back({rounds[begin], error, /*is_measured=*/false});
    }
  }
  return finished;
}

void Applier::append_values(
    const Round& round,
    size_t num_pushes,
    Keys& keys,
    Tensors& values) const {
  keys.single = false;
  keys.list.push_back(round.slice.key);
  const SliceShape shape(round, config_);
  for (size_t i = 0; i < num_pushes; ++i) {
    append_push(round.pushes[i], shape, round.num_elements, buffers_, values);
  }
  values.end_group();
}

void Applier::measure_one(const RoundPtr& round) {
  const auto held = callers_.hold(round);
  Keys keys;
  Tensors values;
  try {
    join_encoded(*round, SliceShape(*round, config_), buffers_);
    const Updates::Update update = updates_.of(*round);
    prepare(begun(*round), update);
    append_values(*round, round->pushes.size(), keys, values);
    round->partial = store_.measure({"push", keys, &values}, update.updater);
  } catch (...) { // apply() has the same error, and reports it
    round->partial = 0;
  }
  done_({{round, std::nullopt, /*is_measured=*/true}});
}

std::optional<std::string> Applier::apply_batch(
    c10::ArrayRef<RoundPtr> rounds,
    const Updates::Update& update) {
  const auto held = callers_.hold(rounds);
  // An opaque updater does not; the callers may not know that it is set yet.
  const bool writes_outs = held.owns_lock() && !update.replaces &&
      !std::holds_alternative<std::shared_ptr<OpaqueUpdater>>(update.updater);
  Keys keys;
  Tensors values;
  Tensors outs; // of callers
  for (const auto& round : rounds) {
    keep_state(*round);
    prepare(begun(*round), update);
    // The first push is rank 0's.
    append_values(
        *round, update.replaces ? 1 : round->pushes.size(), keys, values);
    const at::Tensor out = writes_outs
        ? callers_.out_of(
              *round,
              SliceShape(*round, config_).sizes,
              static_cast<c10::ScalarType>(round->spec->dtype))
        : at::Tensor();
    if (out.defined()) {
      outs.append(out);
    }
    outs.end_group();
  }
  const Tensors* const written = outs.flat.empty() ? nullptr : &outs;
  for (const auto& round : rounds) {
    round->source.reset(); // or the value would not be written in place
  }
  const auto error = error_of([&] {
    const InProgress<Store> updating(owner_);
    const Call call{"push", keys, &values};
    if (update.replaces) {
      store_.assign(call, update.updater);
    } else if (rounds[0]->group) {
      store_.apply(call, update.updater, rounds[0]->factor, written);
    } else {
      store_.apply(call, update.updater, written);
    }
  });
  for (size_t i = 0; i < rounds.size(); ++i) {
    Round& round = *rounds[i];
    round.result = result_of(round);
    for (const auto& out : outs.of(static_cast<int64_t>(i))) {
      if (!error) {
        callers_.set_written(round, round.result->pieces[0]);
        byte_counts().in_pass += static_cast<int64_t>(out.nbytes());
      }
    }
  }
  return error;
}

ValuePtr Applier::result_of(const Round& round) {
  auto result = std::make_shared<StoredValue>();
  if (round.spec->is_row_sparse()) {
    result->is_live = true;
    result->pieces.emplace_back();
  } else {
    const at::Tensor value = store_.lease(round.slice.key).first;
    result->pieces = cut(blob_of(value), config_.piece_bytes);
  }
  return result;
}

void Applier::forget(const Erased& erased) {
  const auto held = held_.find(erased.slice.key);
  if (held != held_.end()) {
    if (held->second.kid != erased.kid) {
      return;
    }
    store_.erase(erased.slice.key);
    held_.erase(held);
  }
  restored_.erase(erased.slice.key);
}

} // namespace torchkv::dist

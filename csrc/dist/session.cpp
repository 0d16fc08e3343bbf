#include "session.h"

#include <algorithm>
#include <limits>
#include <thread>
#include <utility>

#include "../core/errors.h"
#include "errors.h"
#include "node.h"
#include "row_query.h"

namespace torchkv::dist {

Session::Session(
    std::shared_ptr<Node> node,
    const Config& config,
    int64_t inc,
    int64_t sinc,
    Runtime& runtime,
    const Store* owner,
    std::unique_ptr<SnapshotFiles> files,
    const Shard* restored)
    : node_(std::move(node)),
      config_(config),
      server_(node_->rank(), sinc, config, node_->now(), restored),
      worker_(node_->rank(), inc, config, node_->now()),
      files_(std::move(files)),
      applier_(
          runtime,
          owner,
          node_->rank(),
          config,
          Buffers(node_->memory()),
          [this](const auto& finished) { on_applied(finished); }),
      table_queries_(applier_, config, Buffers(node_->memory())) {
  server_.set_select([this, buffers = Buffers(node_->memory())](
                         const auto& slice,
                         const auto& spec,
                         const auto& value,
                         const auto& query) {
    try {
      return spec.is_row_sparse()
          ? table_queries_.answer(slice, spec, value, query)
          : select_rows(slice, spec, value, query, config_, buffers);
    } catch (const std::exception& error) { // of memory
      TORCH_WARN("torchkv: a pull is refused: ", error.what());
      return ValuePtr();
    }
  });
}

Session::~Session() = default;

void Session::join(const char* op, double timeout) {
  const Time end = node_->now() + timeout;
  while (true) {
    {
      const std::lock_guard lock(node_->mutex());
      if (worker_.ready()) {
        return;
      }
      if (node_->now() > end) {
        Error error;
        error.code = ErrorCode::kTimeout;
        for (int32_t rank = 0; rank < config_.num_servers; ++rank) {
          if (worker_.link_state(rank) == LinkState::kHello) {
            error.missing.push_back(rank);
          }
        }
        throw_error(op, error, node_->rank(), timeout);
      }
    }
    check_signals();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

PendingPtr Session::call(
    Request request,
    double timeout,
    bool is_watched,
    Complete complete) {
  const std::lock_guard lock(node_->mutex());
  return call_locked(
      std::move(request), timeout, is_watched, std::move(complete));
}

std::vector<PendingPtr> Session::call_all(
    std::vector<Request> requests,
    double timeout) {
  const std::lock_guard lock(node_->mutex());
  std::vector<PendingPtr> result;
  result.reserve(requests.size());
  for (auto& request : requests) {
    result.push_back(call_locked(
        std::move(request), timeout, /*is_watched=*/false, nullptr));
  }
  return result;
}

bool Session::has_queued() {
  const std::lock_guard lock(node_->mutex());
  return !queued_.empty();
}

PendingPtr Session::call_locked(
    Request request,
    double timeout,
    bool is_watched,
    Complete complete) {
  Watched watched{
      nullptr,
      is_watched ? request.keys() : std::vector<Key>(),
      is_watched,
      is_push(request.kind),
      /*is_close=*/false};
  TORCH_CHECK(
      !node_->is_stopping(), "the store is closed, as the process is ending");
  if (complete == nullptr && queued_.empty()) {
    const auto pending = watched.pending = std::make_shared<Pending>();
    begin(std::move(request), timeout, std::move(watched));
    return pending;
  }
  const auto pending = watched.pending = std::make_shared<Pending>(timeout);
  queued_.push_back(pending);
  queue_.run([this,
              timeout,
              request = std::move(request),
              watched = std::move(watched),
              own = std::move(complete)]() mutable {
    run_queued(std::move(request), timeout, watched, std::move(own));
  });
  return pending;
}

void Session::run_queued(
    Request request,
    double timeout,
    const Watched& watched,
    Complete complete) {
  std::optional<Error> error;
  const auto guarded = [&](c10::function_ref<void()> function) {
    if (const auto thrown = error_of(function)) {
      error = Error{ErrorCode::kTransfer, -1, {}, *thrown, {}};
    }
  };
  if (complete != nullptr) {
    guarded([&] { complete(request); });
    complete = nullptr; // frees what it has of devices
  }
  const std::lock_guard lock(node_->mutex());
  const bool is_withdrawn =
      request.kind == Request::Kind::kDelete && watched.pending->is_finished();
  if (!error && !is_withdrawn) {
    watched.pending->begun();
    guarded([&] { begin(std::move(request), timeout, watched); });
  }
  queued_.erase(queued_.begin()); // they run in order
  if (error) {
    end(watched, {{}, error, {}});
  }
  begin_close();
}

bool Session::withdraw(const PendingPtr& pending) {
  const std::lock_guard lock(node_->mutex());
  if (std::count(queued_.begin(), queued_.end(), pending) != 0) {
    pending->finish({0, Error{ErrorCode::kTimeout, -1, {}, {}, {}}, {}});
  }
  for (const auto& [id, call] : calls_) {
    if (call.pending == pending) {
      worker_.withdraw(id, node_->now());
      perform(worker_.take()); // may end the call
      node_->deliver();
      break;
    }
  }
  return !pending->is_finished() || pending->wait().begun;
}

void Session::begin(Request request, double timeout, Watched watched) {
  const CallId id = worker_.call(std::move(request), node_->now(), timeout);
  calls_.emplace(id, std::move(watched));
  perform(worker_.take());
  node_->deliver();
}

std::optional<Error> Session::deferred_error(const Keys* keys) {
  const std::lock_guard lock(node_->mutex());
  return deferred_.take(keys);
}

std::optional<Error> Session::deferred_error(c10::function_ref<Keys()> keys) {
  const std::lock_guard lock(node_->mutex());
  if (deferred_.empty()) {
    return std::nullopt;
  }
  const Keys of = keys();
  return deferred_.take(&of);
}

void Session::close(double timeout) {
  const std::lock_guard lock(node_->mutex());
  if (!std::exchange(closing_, true)) {
    close_timeout_ = timeout;
    begin_close();
  }
}

// The call may begin when the servers are known; on_timer() tries again.
void Session::begin_close() {
  if (closing_ && close_timeout_ && worker_.ready() && queued_.empty()) {
    Watched watched{
        std::make_shared<Pending>(), {}, false, false, /*is_close=*/true};
    calls_.emplace(
        worker_.call(
            Request(Request::Kind::kClose), node_->now(), *close_timeout_),
        std::move(watched));
    close_timeout_.reset();
    perform(worker_.take());
    node_->deliver();
  }
}

void Session::flush() {
  std::vector<PendingPtr> pushes;
  {
    const std::lock_guard lock(node_->mutex());
    pushes = queued_;
    for (const auto& [id, call] : calls_) {
      if (call.is_push) {
        pushes.push_back(call.pending);
      }
    }
  }
  for (const auto& push : pushes) {
    push->wait();
  }
}

int64_t Session::version(const SliceId& slice) {
  const std::lock_guard lock(node_->mutex());
  return worker_.version(slice).value_or(-1);
}

Blob Session::options() {
  const std::lock_guard lock(node_->mutex());
  return server_.options();
}

bool Session::closed() {
  const std::lock_guard lock(node_->mutex());
  return closed_;
}

std::optional<Error> Session::fatal() {
  const std::lock_guard lock(node_->mutex());
  return worker_.fatal();
}

std::vector<int32_t> Session::lost_ranks() {
  const std::lock_guard lock(node_->mutex());
  const auto is_named = [](const std::optional<Error>& error, int32_t rank) {
    return error && error->who == rank &&
        (error->code == ErrorCode::kWorkerLost ||
         error->code == ErrorCode::kServerLost);
  };
  std::vector<int32_t> lost;
  for (int32_t rank = 0; rank < config_.num_workers; ++rank) {
    const bool is_lost = worker_.link_state(rank) == LinkState::kLost ||
        server_.peer_state(rank) == PeerState::kLost ||
        is_named(worker_.fatal(), rank) || is_named(server_.fatal(), rank);
    if (rank != node_->rank() && is_lost) {
      lost.push_back(rank);
    }
  }
  return lost;
}

void Session::on_frame(Direction direction, const Frame& frame) {
  if (direction == Direction::kRequest) {
    server_.on_message(frame, node_->now());
    perform(server_.take());
  } else {
    worker_.on_message(frame, node_->now());
    perform(worker_.take());
  }
}

void Session::on_timer(Time now) {
  begin_close();
  worker_.on_timer(now);
  perform(worker_.take());
  server_.on_timer(now);
  perform(server_.take());
}

void Session::on_peer_lost(int32_t rank) {
  worker_.on_peer_lost(rank, node_->now());
  perform(worker_.take());
  server_.on_peer_lost(rank, node_->now());
  perform(server_.take());
}

void Session::on_applied(const std::vector<Applier::Finished>& finished) {
  const std::lock_guard lock(node_->mutex());
  note_applied(finished);
  perform(server_.take());
  node_->deliver();
}

void Session::note_applied(const std::vector<Applier::Finished>& finished) {
  for (const auto& [round, error, is_measured] : finished) {
    if (is_measured) {
      server_.on_measured(round, node_->now());
    } else {
      server_.on_applied(round, error, node_->now());
    }
  }
}

template <class Other>
void Session::perform_one(const Other& /*action*/) {
  TORCHKV_INTERNAL_ASSERT(false);
}

void Session::perform(Actions actions) {
  while (!actions.empty()) {
    std::vector<RoundPtr> rounds;
    for (auto& action : actions) {
      if (auto* apply = std::get_if<Apply>(&action)) {
        rounds.push_back(std::move(apply->round));
      } else {
        std::visit([this](auto& one) { perform_one(one); }, action);
      }
    }
    actions.clear();
    if (!rounds.empty()) {
      node_->reclaim(); // so that values are written in place
      if (const auto finished = applier_.apply_now(rounds)) {
        note_applied(*finished);
        actions = server_.take();
        continue;
      }
    }
    for (auto& round : rounds) {
      applier_.apply(std::move(round));
    }
  }
}

void Session::perform_one(Send& action) {
  const bool to_server = action.to.role == Address::Role::kServer;
  node_->send(
      action.to.number,
      to_server ? Direction::kRequest : Direction::kAnswer,
      std::move(action.frame));
}

void Session::perform_one(const Wake& action) {
  node_->wake_at(action.at);
}

void Session::perform_one(Measure& action) {
  applier_.measure(std::move(action.round));
}

void Session::perform_one(const Erase& action) {
  table_queries_.forget(action.slice);
  applier_.erase(action.slice, action.kid);
}

void Session::perform_one(Return& action) {
  const auto found = calls_.find(action.call);
  if (found == calls_.end()) {
    return;
  }
  const Watched watched = std::move(found->second);
  calls_.erase(found);
  if (watched.is_close) {
    closed_ = true;
    // Without an error, no rank uses this one's server any more.
    if (!action.error || worker_.fatal()) {
      applier_.forget_python(std::numeric_limits<int64_t>::max());
    }
  }
  end(watched, std::move(action));
}

void Session::end(const Watched& watched, Return result) {
  if (result.error && watched.is_watched) {
    deferred_.add(*result.error, watched.keys);
  }
  watched.pending->finish(std::move(result));
}

} // namespace torchkv::dist

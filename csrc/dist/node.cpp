#include "node.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <random>
#include <utility>

#include "../core/process.h"
#include "../core/signals.h"
#include "../core/text.h"
#include "access.h"
#include "errors.h"
#include "session.h"
#include "within.h"

namespace torchkv::dist {
namespace {

constexpr Time kTick = 0.2; // of the cores, at most
constexpr size_t kMaxEarly = 1024;
constexpr size_t kMaxSent = 4096; // messages that travel together
constexpr size_t kMaxSentBytes = size_t{2} << 20U; // without long payloads

// All nodes of this process; leaked, as their threads end with the process.
struct Nodes {
  std::timed_mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<Node>> by_token;
  uint64_t num_forks = fork_count();
  bool closes_at_exit = false;
  bool is_interrupted = false; // in close_all

  static Nodes& get() {
    static auto* nodes = new Nodes();
    return *nodes;
  }
};

Token random_token() {
  std::random_device random; // of the system, getrandom
  Token token{};
  for (auto& byte : token) {
    byte = static_cast<std::byte>(random());
  }
  return token;
}

std::string text_of(const Token& token) {
  return {reinterpret_cast<const char*>(token.data()), token.size()};
}

Token token_of(const std::string& text) {
  Token token{};
  TORCH_CHECK(
      text.size() == token.size(),
      "create: the rendezvous holds a wrong token");
  std::memcpy(token.data(), text.data(), token.size());
  return token;
}

} // namespace

std::shared_ptr<Node> Node::join(
    const StoreOptions& options,
    const Launch& launch,
    double timeout) {
  Nodes& nodes = Nodes::get();
  TORCH_CHECK(
      nodes.num_forks == fork_count(),
      "create: expected a process that was not forked from one with a store on "
      "several machines; start it by 'spawn'");
  const auto lock = lock_within(nodes.mutex, "create", launch.rank, timeout);
  const auto rendezvous = bounded(
      options.rendezvous != nullptr
          ? options.rendezvous
          : environment_rendezvous(launch.rank, timeout),
      launch.rank,
      timeout);
  const std::string prefix = "torchkv/" + launch_id() + "/";
  const std::string token =
      rendezvous->set_once(prefix + "token", text_of(random_token()));
  auto& node = nodes.by_token[token];
  if (node == nullptr) {
    auto made = std::make_shared<Node>(
        Private(), rendezvous, prefix, token, options, launch, timeout);
    if (!std::exchange(nodes.closes_at_exit, true)) {
      // Before the destructors of what the library uses.
      std::atexit([] { close_all(kExitTimeout); });
    }
    node = std::move(made);
  }
  TORCH_CHECK(
      !node->is_stopped(), "create: expected a process that is not ending");
  TORCH_CHECK_VALUE(
      node->rank() == launch.rank && node->num_ranks() == launch.world_size,
      "create: expected rank ",
      node->rank(),
      " of ",
      node->num_ranks(),
      ", as in this process's earlier stores, but got rank ",
      launch.rank,
      " of ",
      launch.world_size);
  TORCH_CHECK_VALUE(
      options.security == node->security_,
      "create: expected the security of this process's earlier stores, ",
      quoted(node->security_),
      ", but got ",
      quoted(options.security));
  return node;
}

Node::Node(
    Private /*private*/,
    std::shared_ptr<Rendezvous> rendezvous,
    std::string prefix,
    const std::string& token_text,
    const StoreOptions& options,
    const Launch& launch,
    double timeout)
    : rank_(static_cast<int32_t>(launch.rank)),
      num_ranks_(static_cast<int32_t>(launch.world_size)),
      rendezvous_(std::move(rendezvous)),
      prefix_(std::move(prefix)),
      security_(options.security),
      timeout_(timeout),
      reaper_(std::make_unique<Background>()) {
  check_security(options);
  const Token token = token_of(token_text);
  uint64_t job = 0;
  std::memcpy(&job, token.data(), sizeof(job));
  job_ = static_cast<int64_t>(job & (static_cast<uint64_t>(kMaxCounter) - 1));
  transport_ =
      num_ranks_ == 1 ? make_direct() : make_zeromq(token, options, timeout);
  thread_ = std::thread([this] { loop(); });
}

std::string Node::agree(const std::string& key, const std::string& value) {
  if (rank_ == 0) {
    rendezvous_->set(prefix_ + key, value);
    return value;
  }
  const auto agreed = rendezvous_->get(prefix_ + key, timeout_);
  if (!agreed) {
    Error error;
    error.code = ErrorCode::kTimeout;
    error.missing = {0};
    throw_error("create", error, rank_, timeout_);
  }
  return *agreed;
}

bool Node::is_stopped() {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

int64_t Node::num_made(uint64_t id) {
  const std::lock_guard lock(mutex_);
  return num_made_[id]++;
}

void Node::send(int32_t rank, Direction direction, Frame frame) {
  if (stopping_) {
    return;
  }
  // A list of many keys may be longer than a receiver takes at once.
  size_t sent = 0;
  size_t num_bytes = 0; // of the payloads and keys that are in the frame's head
  const auto send_until = [&](size_t end) {
    Frame part(
        std::make_move_iterator(frame.begin() + static_cast<int64_t>(sent)),
        std::make_move_iterator(frame.begin() + static_cast<int64_t>(end)));
    transport_->send(rank, direction, std::move(part));
    sent = end;
    num_bytes = 0;
  };
  for (size_t i = 0; i < frame.size(); ++i) {
    const size_t size = frame[i].payload.size();
    const Key& key = frame[i].slice.key;
    const size_t bytes = (size < kLongPayload ? size : 0) +
        (key.kind() == KeyKind::kStr ? key.text().size() : 0) +
        (frame[i].list ? frame[i].list->num_bytes() : 0);
    if (i - sent == kMaxSent || num_bytes + bytes > kMaxSentBytes) {
      send_until(i);
    }
    num_bytes += bytes;
  }
  if (sent == 0) {
    transport_->send(rank, direction, std::move(frame));
  } else {
    send_until(frame.size());
  }
}

void Node::deliver() {
  if (!stopping_) {
    transport_->deliver(*this);
  }
}

void Node::wake_at(Time time) {
  if (!stopping_ && time < next_timer_) {
    next_timer_ = time;
    transport_->wake();
  }
}

void Node::reclaim() {
  if (!stopping_) {
    transport_->reclaim();
  }
}

void Node::add(uint64_t store, std::shared_ptr<Session> session) {
  Session& added = *session;
  sessions_[store] = std::move(session);
  added.on_timer(now()); // which says hello
  for (auto it = early_.begin(); it != early_.end();) {
    if (it->store == store) {
      added.on_frame(Direction::kRequest, it->frame);
      it = early_.erase(it);
    } else {
      ++it;
    }
  }
  deliver();
}

void Node::on_frame(int32_t /*rank*/, Direction direction, Frame frame) {
  const uint64_t store = frame[0].header.store;
  const auto found = sessions_.find(store);
  if (found != sessions_.end()) {
    found->second->on_frame(direction, frame);
    return;
  }
  if (direction != Direction::kRequest || frame[0].kind != Kind::kHello) {
    return;
  }
  const auto same =
      std::find_if(early_.begin(), early_.end(), [&](const Early& early) {
        return early.store == store &&
            early.frame[0].header.rank == frame[0].header.rank;
      });
  if (same != early_.end()) {
    same->frame = std::move(frame);
  } else if (early_.size() < kMaxEarly) {
    early_.push_back({store, std::move(frame)});
  }
}

void Node::on_peer_lost(int32_t rank) {
  for (const auto& [id, session] : sessions_) {
    session->on_peer_lost(rank);
  }
}

void Node::loop() {
  // Freed on another thread: that joins threads, and may need Python's GIL.
  std::vector<std::shared_ptr<Session>> closed;
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    transport_->poll(lock, std::max(next_timer_ - now(), 0.0), *this);
    const Time time = now();
    if (time >= next_timer_) {
      next_timer_ = time + kTick;
      for (const auto& [id, session] : sessions_) {
        next_timer_ =
            std::min(next_timer_, time + (session->config().heartbeat / 5));
      }
      transport_->reclaim();
      for (auto it = sessions_.begin(); it != sessions_.end();) {
        it->second->on_timer(time);
        // An updater that never returns keeps nobody but its session.
        if (it->second->is_closed() && it->second.use_count() == 1 &&
            it->second->applier().is_idle()) {
          closed.push_back(std::move(it->second));
          it = sessions_.erase(it);
        } else {
          ++it;
        }
      }
      deliver();
    }
    if (!closed.empty()) {
      reaper_->run([ended = std::exchange(closed, {})] {});
    }
  }
}

void Node::close_all(double timeout) {
  Nodes& nodes = Nodes::get();
  if (nodes.num_forks != fork_count()) {
    return;
  }
  const std::lock_guard lock(nodes.mutex);
  // A program that is interrupted while it ends does not wait again: Python,
  // multiprocessing and the C library all call this.
  const bool was_interrupted = std::exchange(nodes.is_interrupted, true);
  for (const auto& [token, node] : nodes.by_token) {
    if (node != nullptr) {
      node->close(was_interrupted ? 0 : timeout);
    }
  }
  nodes.is_interrupted = was_interrupted;
}

void Node::close(double timeout) {
  const Time end = now() + timeout;
  std::vector<std::shared_ptr<Session>> sessions;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, session] : sessions_) {
      sessions.push_back(session);
    }
  }
  Time linger = 0;
  for (const auto& session : sessions) {
    session->close(std::max(end - now(), 0.0));
    if (session->fatal()) {
      // The others should hear of the cause, not of this process's end.
      linger = std::max(linger, 2 * session->config().heartbeat);
    }
  }
  for (const auto& session : sessions) {
    while (!session->closed() && now() < end) {
      check_signals();
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    if (session->closed()) {
      // What it frees may need Python.
      session->applier().drain(std::max(end - now(), 0.0));
    }
  }
  std::this_thread::sleep_for(std::chrono::duration<double>(linger));
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopping_, true)) {
      return;
    }
  }
  transport_->wake();
  thread_.join();
  reaper_.reset(); // when it has freed what it has
  sessions.clear();
  // Freed without the mutex: their appliers may need it to end. Those of stores
  // that still exist are leaked: another thread may free these at any time.
  // Those whose updater has not returned are, too.
  decltype(sessions_) ended;
  {
    const std::lock_guard lock(mutex_);
    ended.swap(sessions_);
    transport_->close();
  }
  for (auto& [id, session] : ended) {
    if (session.use_count() > 1 || !session->applier().is_idle()) {
      // NOLINTNEXTLINE(bugprone-unhandled-exception-at-new): a few bytes
      new std::shared_ptr<Session>(std::move(session));
    }
  }
}

} // namespace torchkv::dist

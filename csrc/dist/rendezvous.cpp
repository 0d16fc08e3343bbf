#include "rendezvous.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../core/errors.h"
#include "../core/signals.h"
#include "../core/text.h"
#include "background.h"
#include "within.h"

namespace torchkv::dist {
namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::vector<uint8_t> bytes(const std::string& text) {
  return {text.begin(), text.end()};
}

std::string text(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

class C10dRendezvous final : public Rendezvous {
 public:
  C10dRendezvous(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    store_->set(prefix_ + key, bytes(value));
  }
  // In short waits: a c10d store blocks its other callers during one.
  std::optional<std::string> get(const std::string& key, double timeout)
      override {
    const auto end = std::chrono::steady_clock::now() + milliseconds(timeout);
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        if (store_->check({prefix_ + key})) {
          return text(store_->get(prefix_ + key));
        }
      }
      if (std::chrono::steady_clock::now() >= end) {
        return std::nullopt;
      }
      check_signals();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return store_->add(prefix_ + key, amount);
  }
  std::string set_once(const std::string& key, const std::string& value)
      override {
    const std::lock_guard lock(mutex_);
    return text(store_->compareSet(prefix_ + key, bytes(""), bytes(value)));
  }
  std::string host() const override {
    c10d::Store* store = store_.get();
    while (auto* const prefixed = dynamic_cast<c10d::PrefixStore*>(store)) {
      store = prefixed->getUnderlyingStore().get();
    }
    const auto* const tcp = dynamic_cast<const c10d::TCPStore*>(store);
    return tcp == nullptr ? std::string() : tcp->getHost();
  }

 private:
  std::mutex mutex_; // a TCPStore's connection serves one call at a time
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::string prefix_;
};

// Runs the calls on a thread of its own. While one does not end, others fail at
// once; at the end, the thread is left behind with it.
class BoundedRendezvous final : public Rendezvous {
 public:
  BoundedRendezvous(
      std::shared_ptr<Rendezvous> rendezvous,
      int64_t rank,
      double timeout)
      : rendezvous_(std::move(rendezvous)),
        rank_(rank),
        timeout_(timeout),
        thread_(std::make_unique<Background>()) {}
  ~BoundedRendezvous() override {
    if (*num_running_ != 0) {
      // NOLINTNEXTLINE(bugprone-unused-return-value): leaked
      thread_.release();
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(BoundedRendezvous);

  // Runs a call, which has copies of its arguments: it may outlive the caller.
  template <class Call>
  auto run(Call call) {
    using Result = decltype(call(*rendezvous_));
    auto done = std::make_shared<std::promise<Result>>();
    auto result = done->get_future();
    const auto has_ended = std::make_shared<std::atomic<bool>>(false);
    const bool is_stuck = has_stuck_call();
    ++*num_running_;
    thread_->run([store = rendezvous_,
                  call = std::move(call),
                  done,
                  has_ended,
                  num_running = num_running_] {
      std::optional<Result> value;
      std::exception_ptr error;
      try {
        value = call(*store);
      } catch (...) {
        error = std::current_exception();
      }
      // First: the caller may free the rendezvous as soon as it knows.
      *has_ended = true;
      --*num_running;
      if (error) {
        done->set_exception(error);
      } else {
        done->set_value(std::move(*value));
      }
    });
    try {
      wait_within(
          "rendezvous",
          rank_,
          is_stuck ? 0 : timeout_,
          is_stuck ? "the rendezvous has not answered an earlier call"
                   : "the rendezvous has not answered",
          [&](auto duration) {
            return result.wait_for(duration) == std::future_status::ready;
          });
    } catch (...) { // also by a signal: what cleans up must not wait again
      if (!is_stuck &&
          result.wait_for(kSignalPeriod) != std::future_status::ready) {
        const std::lock_guard lock(mutex_);
        given_up_ = has_ended;
      }
      throw;
    }
    return result.get();
  }

  void set(const std::string& key, const std::string& value) override {
    run([key, value](Rendezvous& store) {
      store.set(key, value);
      return true;
    });
  }
  std::optional<std::string> get(const std::string& key, double timeout)
      override {
    const auto end = std::chrono::steady_clock::now() + milliseconds(timeout);
    while (true) {
      auto value = run([key](Rendezvous& store) { return store.get(key, 0); });
      if (value || std::chrono::steady_clock::now() >= end) {
        return value;
      }
      check_signals();
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  int64_t add(const std::string& key, int64_t amount) override {
    return run(
        [key, amount](Rendezvous& store) { return store.add(key, amount); });
  }
  std::string set_once(const std::string& key, const std::string& value)
      override {
    return run(
        [key, value](Rendezvous& store) { return store.set_once(key, value); });
  }
  std::string host() const override {
    return rendezvous_->host();
  }

 private:
  bool has_stuck_call() {
    const std::lock_guard lock(mutex_);
    return given_up_ != nullptr && !*given_up_;
  }

  const std::shared_ptr<Rendezvous> rendezvous_;
  const int64_t rank_;
  const double timeout_;
  std::mutex mutex_; // guards given_up_
  std::shared_ptr<std::atomic<bool>> given_up_; // whether that call has ended
  const std::shared_ptr<std::atomic<int>> num_running_ =
      std::make_shared<std::atomic<int>>(0);
  std::unique_ptr<Background> thread_;
};

struct GroupHook {
  std::mutex mutex; // guards get
  GetGroup get;

  static GroupHook& instance() {
    // Leaked: used until the process ends.
    static auto* hook = new GroupHook;
    return *hook;
  }
};

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

int64_t number_of(const char* name) {
  const char* value = variable(name);
  TORCH_CHECK(
      value != nullptr,
      "create: expected the environment variable ",
      name,
      ", which torchrun sets, or the arguments rank, world_size and store");
  char* end = nullptr;
  const long long number = std::strtoll(value, &end, 10);
  TORCH_CHECK(
      *end == '\0' && number >= 0,
      "create: expected a number in the environment variable ",
      name,
      ", but got ",
      quoted(value));
  return number;
}

} // namespace

std::shared_ptr<Rendezvous> make_rendezvous(
    const c10::intrusive_ptr<c10d::Store>& store,
    const std::string& prefix) {
  return std::make_shared<C10dRendezvous>(store, prefix);
}

std::shared_ptr<Rendezvous> bounded(
    std::shared_ptr<Rendezvous> rendezvous,
    int64_t rank,
    double timeout) {
  return dynamic_cast<BoundedRendezvous*>(rendezvous.get()) != nullptr
      ? rendezvous
      : std::make_shared<BoundedRendezvous>(
            std::move(rendezvous), rank, timeout);
}

void set_default_group(GetGroup get) {
  GroupHook& hook = GroupHook::instance();
  const std::lock_guard lock(hook.mutex);
  hook.get = std::move(get);
}

StoreOptions with_default_group(StoreOptions options) {
  GetGroup get;
  {
    GroupHook& hook = GroupHook::instance();
    const std::lock_guard lock(hook.mutex);
    get = hook.get;
  }
  if (options.rendezvous != nullptr || !get) {
    return options;
  }
  if (auto group = get()) {
    options.rank = options.rank.value_or(group->rank);
    options.world_size = options.world_size.value_or(group->world_size);
    options.rendezvous = std::move(group->rendezvous);
  }
  return options;
}

std::shared_ptr<Rendezvous> environment_rendezvous(
    int64_t rank,
    double timeout) {
  static std::mutex mutex;
  // Leaked: a rank that hosts the store must serve the others until it ends.
  static auto* made = new std::shared_ptr<Rendezvous>();
  const std::lock_guard lock(mutex);
  if (*made == nullptr) {
    const int64_t port = number_of("MASTER_PORT");
    const char* host = variable("MASTER_ADDR");
    TORCH_CHECK(
        host != nullptr,
        "create: expected the environment variable MASTER_ADDR, which torchrun "
        "sets, or the arguments rank, world_size and store");
    const char* agent = variable("TORCHELASTIC_USE_AGENT_STORE");
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer =
        rank == 0 && (agent == nullptr || std::string(agent) != "True");
    options.waitWorkers = false;
    options.timeout = milliseconds(timeout);
    // Where rank 0's training script makes a process group, too.
    options.multiTenant = true;
    // On a thread, as it may wait for the host: signals end the call.
    auto done = std::make_shared<std::promise<std::shared_ptr<Rendezvous>>>();
    auto result = done->get_future();
    std::thread([done, options, host = std::string(host)] {
      try {
        done->set_value(make_rendezvous(
            c10::make_intrusive<c10d::TCPStore>(host, options)));
      } catch (...) {
        done->set_exception(std::current_exception());
      }
    }).detach();
    // A little longer, as its own error says more.
    constexpr double kMore = 1;
    *made = get_within(
        result,
        "create",
        rank,
        timeout + kMore,
        "the host in MASTER_ADDR has not answered");
  }
  return *made;
}

Launch environment_launch(const StoreOptions& options) {
  Launch launch;
  launch.rank = options.rank ? *options.rank : number_of("RANK");
  launch.world_size =
      options.world_size ? *options.world_size : number_of("WORLD_SIZE");
  TORCH_CHECK_VALUE(
      launch.world_size > 0 && launch.rank >= 0 &&
          launch.rank < launch.world_size,
      "create: expected a rank from 0 to world_size - 1, but got rank ",
      launch.rank,
      " of ",
      launch.world_size);
  return launch;
}

std::string reachable_host(const Rendezvous& rendezvous) {
  std::string host = rendezvous.host();
  const char* master = variable("MASTER_ADDR");
  if (host.empty() && master != nullptr) {
    host = master;
  }
  return host.empty() ? "localhost" : host;
}

std::string launch_id() {
  const char* run = variable("TORCHELASTIC_RUN_ID");
  const char* restart = variable("TORCHELASTIC_RESTART_COUNT");
  return (run == nullptr ? std::string() : run) + "/" +
      (restart == nullptr ? "0" : restart);
}

} // namespace torchkv::dist

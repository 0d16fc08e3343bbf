#include "forwarding_store.h"

#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>

#include "core/in_progress.h"
#include "store/registry.h"

namespace torchkv::testing {
namespace {

using Updaters = InProgress<std::mutex>;

// A call, and what its thread has that the call depends on.
struct Job {
  explicit Job(c10::function_ref<void()> call_) : call(call_) {}

  void run(const Store* store) {
    const at::ThreadLocalStateGuard state_guard(state);
    const c10::WarningUtils::WarningHandlerGuard warnings_guard(warnings);
    const InProgress<Store> in_store(store, stores);
    const Updaters in_updaters(nullptr, updaters);
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
  }

  const c10::function_ref<void()> call;
  const at::ThreadLocalState state; // grad and inference mode, dispatch, ...
  c10::WarningHandler* const warnings =
      c10::WarningUtils::get_warning_handler();
  // The caller waits, so these stay what they are.
  const InProgress<Store>* const stores = InProgress<Store>::innermost();
  const Updaters* const updaters = Updaters::innermost();
  std::exception_ptr error;
  bool is_done = false;
};

} // namespace

class ForwardingStore::Workers {
 public:
  explicit Workers(const Store* store) : store_(store) {}
  ~Workers() {
    {
      const std::lock_guard lock(mutex_);
      is_stopping_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) {
      thread.join();
    }
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  Workers(Workers&&) = delete;
  Workers& operator=(Workers&&) = delete;

  void run(Job& job) {
    {
      std::unique_lock lock(mutex_);
      queue_.push_back(&job);
      if (num_idle_ < queue_.size()) {
        threads_.emplace_back([this] { work(); });
        ++num_idle_;
      }
      changed_.notify_all();
      changed_.wait(lock, [&] { return job.is_done; });
    }
    if (job.error != nullptr) {
      std::rethrow_exception(job.error);
    }
  }
  // Threads do not survive a fork.
  bool is_forked() const {
    return getpid() != process_;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return is_stopping_ || !queue_.empty(); });
      if (queue_.empty()) {
        return;
      }
      Job& job = *queue_.front();
      queue_.pop_front();
      --num_idle_;
      lock.unlock();
      job.run(store_);
      lock.lock();
      ++num_idle_;
      job.is_done = true;
      changed_.notify_all();
    }
  }

  const Store* const store_;
  const pid_t process_ = getpid();
  std::mutex mutex_; // guards the rest, and is_done of jobs
  std::condition_variable changed_;
  std::deque<Job*> queue_;
  bool is_stopping_ = false;
  // One, unless calls come while an updater runs.
  std::vector<std::thread> threads_;
  size_t num_idle_ = 0;
};

ForwardingStore::ForwardingStore(std::unique_ptr<Store> inner)
    : inner_(std::move(inner)), workers_(std::make_unique<Workers>(this)) {}

ForwardingStore::~ForwardingStore() {
  if (workers_->is_forked()) {
    (void)workers_.release(); // leaked: there are no threads to join
  }
}

void ForwardingStore::run(c10::function_ref<void()> call) const {
  Job job(call);
  workers_->run(job);
}

void forward_stores_of(const std::string& type) {
  const MakeStore before = replace_store(type, {});
  replace_store(type, [before](Runtime& runtime, const StoreOptions& options) {
    return std::make_unique<ForwardingStore>(before(runtime, options));
  });
}

} // namespace torchkv::testing

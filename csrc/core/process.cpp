#include "process.h"

#include <pthread.h>

#include <atomic>

#include "errors.h"

namespace torchkv {
namespace {

struct Process {
  Process() {
    TORCHKV_INTERNAL_ASSERT(
        pthread_atfork(
            [] { get().mutex.lock(); },
            [] { get().mutex.unlock(); },
            [] {
              get().num_forks.fetch_add(1, std::memory_order_relaxed);
              get().mutex.unlock();
            }) == 0);
  }

  static Process& get() {
    // Leaked: a fork may come after static destruction.
    static auto* process = new Process();
    return *process;
  }

  std::mutex mutex;
  std::atomic<uint64_t> num_forks{0};
};

// With the library: a process may fork before it makes its first store.
[[gnu::constructor]] void register_at_load() {
  Process::get();
}

} // namespace

uint64_t fork_count() {
  return Process::get().num_forks.load(std::memory_order_relaxed);
}

std::mutex& process_mutex() {
  return Process::get().mutex;
}

} // namespace torchkv

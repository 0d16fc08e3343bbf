// parallel_spans: every unit once, within the limit of threads.
#include "kernels/cpu/parallel.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace torchkv {
namespace {

using kernels::cpu::parallel_spans;
using kernels::cpu::Work;

constexpr std::chrono::seconds kPatience(30);

// Sets the number of PyTorch's threads for a scope.
class NumThreads {
 public:
  explicit NumThreads(int num_threads) : before_(at::get_num_threads()) {
    at::set_num_threads(num_threads);
  }
  ~NumThreads() {
    at::set_num_threads(before_);
  }
  NumThreads(const NumThreads&) = delete;
  NumThreads& operator=(const NumThreads&) = delete;
  NumThreads(NumThreads&&) = delete;
  NumThreads& operator=(NumThreads&&) = delete;

 private:
  const int before_;
};

// Counts the threads that are inside a body at the same time. The first ones
// wait until `wanted` are inside, so that tests do not depend on timing.
class Rendezvous {
 public:
  explicit Rendezvous(int wanted = 0) : wanted_(wanted) {}

  void enter(std::chrono::milliseconds patience = kPatience) {
    std::unique_lock lock(mutex_);
    threads_.insert(std::this_thread::get_id());
    most_ = std::max(most_, ++inside_);
    changed_.notify_all();
    changed_.wait_for(lock, patience, [&] { return most_ >= wanted_; });
  }
  void leave() {
    const std::lock_guard lock(mutex_);
    --inside_;
  }
  int most() {
    const std::lock_guard lock(mutex_);
    return most_;
  }
  size_t num_threads() {
    const std::lock_guard lock(mutex_);
    return threads_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<std::thread::id> threads_;
  const int wanted_;
  int inside_ = 0;
  int most_ = 0;
};

void run(
    const std::vector<Work>& jobs,
    c10::function_ref<void(int64_t, int64_t, int64_t, bool)> body) {
  parallel_spans(
      static_cast<int64_t>(jobs.size()),
      [&](int64_t job) { return jobs[job]; },
      body);
}

// Work for many pieces for any number of threads; uses no memory.
const std::vector<Work> kLarge{{int64_t{16} << 20, 4}};

void expect_each_unit_once(const std::vector<Work>& jobs) {
  std::vector<std::vector<std::atomic<uint8_t>>> seen;
  for (const auto& job : jobs) {
    seen.emplace_back(job.num_units);
  }
  std::atomic<int> odd_cuts{0};
  run(jobs, [&](int64_t job, int64_t begin, int64_t end, bool) {
    odd_cuts += begin % 1024 != 0;
    for (int64_t i = begin; i < end; ++i) {
      ++seen[job][i];
    }
  });
  EXPECT_EQ(odd_cuts, 0);
  for (const auto& units : seen) {
    EXPECT_TRUE(
        std::all_of(
            units.begin(),
            units.end(),
            [](const auto& count) { return count == 1; }))
        << "a job of " << units.size() << " units, of " << jobs.size();
  }
}

TEST(ParallelTest, EachUnitOnce) {
  const std::vector<std::vector<Work>> all{
      {},
      {{0, 4}},
      {{1, 1}},
      {{3000001, 4}}, // split
      {{1024, 4096}, {1025, 4096}, {1023, 4096}, {1, 1 << 22}},
      {{5, 8}, {0, 8}, {2000003, 8}, {0, 8}, {0, 8}, {7, 1}, {70000, 64}},
      {{0, 4}, {3000000, 12}, {0, 4}},
      std::vector<Work>(10000, {7, 4}), // grouped
      std::vector<Work>(300, {4097, 16}),
      std::vector<Work>(3000, {0, 16})};
  for (const int num_threads : {1, 2, 3, 8}) {
    const NumThreads guard(num_threads);
    for (const auto& jobs : all) {
      SCOPED_TRACE(
          ::testing::Message()
          << jobs.size() << " jobs, " << num_threads << " threads");
      expect_each_unit_once(jobs);
    }
  }
}

// Whether `jobs` run on the calling thread, one after another.
bool stays_in_order(const std::vector<Work>& jobs) {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> good{true};
  std::atomic<int64_t> last_job{-1};
  std::atomic<int64_t> last_end{0};
  run(jobs, [&](int64_t job, int64_t begin, int64_t end, bool) {
    good = good && std::this_thread::get_id() == caller &&
        (job > last_job || (job == last_job && begin == last_end));
    last_job = job;
    last_end = end;
  });
  return good;
}

TEST(ParallelTest, LittleWorkStaysOnTheCallingThreadInOrder) {
  const NumThreads guard(4);
  EXPECT_TRUE(stays_in_order({{1000, 4}}));
  EXPECT_TRUE(stays_in_order(std::vector<Work>(100, {1000, 1})));
  EXPECT_TRUE(stays_in_order({{100, 4}, {0, 4}, {1, 4}}));
}

TEST(ParallelTest, OneThreadRunsAllInOrder) {
  const NumThreads guard(1);
  EXPECT_TRUE(stays_in_order(kLarge));
  EXPECT_TRUE(stays_in_order(std::vector<Work>(10000, {1000, 4})));
}

TEST(ParallelTest, InsideAParallelRegionItStaysOnTheCallingThread) {
  const NumThreads guard(3);
  Rendezvous meeting(2);
  std::atomic<bool> in_order{true};
  std::atomic<int> nested{0};
  run(kLarge, [&](int64_t, int64_t begin, int64_t, bool) {
    meeting.enter(); // guarantees several threads
    if (begin % (1 << 22) == 0) {
      in_order = in_order && stays_in_order(kLarge);
      ++nested;
    }
    meeting.leave();
  });
  EXPECT_GT(meeting.most(), 1);
  EXPECT_GT(nested, 0);
  EXPECT_TRUE(in_order);
}

#ifndef __SANITIZE_THREAD__ // there, PyTorch's loops stay on their thread
TEST(ParallelTest, LargeWorkTakesAsManyThreadsAsPyTorchHas) {
  for (const int num_threads : {2, 3, 5}) {
    const NumThreads guard(num_threads);
    Rendezvous meeting(num_threads);
    run(kLarge, [&](int64_t, int64_t, int64_t, bool) {
      meeting.enter();
      meeting.leave();
    });
    EXPECT_EQ(meeting.most(), num_threads);
    EXPECT_EQ(meeting.num_threads(), static_cast<size_t>(num_threads));
  }
}

TEST(ParallelTest, MediumWorkTakesFewerThreads) {
  const NumThreads guard(8);
  Rendezvous meeting(8);
  // Little more than the limit for one thread.
  run({{300 << 10, 1}}, [&](int64_t, int64_t, int64_t, bool) {
    meeting.enter(std::chrono::milliseconds(20));
    meeting.leave();
  });
  EXPECT_LT(meeting.most(), 8);
}

TEST(ParallelTest, ManySmallJobsTakeSeveralThreads) {
  const NumThreads guard(2);
  Rendezvous meeting(2);
  run(std::vector<Work>(10000, {64, 4}), [&](int64_t, int64_t, int64_t, bool) {
    meeting.enter();
    meeting.leave();
  });
  EXPECT_EQ(meeting.most(), 2);
}
#endif

// Concurrent callers share the threads; each has at least its own.
TEST(ParallelTest, ConcurrentCallersShareTheLimit) {
  constexpr int kNumThreads = 3;
  constexpr int kCallers = 4;
  const NumThreads guard(kNumThreads);
  for (int round = 0; round < 20; ++round) {
    Rendezvous meeting; // of all calls
    Rendezvous start(kCallers);
    std::vector<std::thread> callers;
    callers.reserve(kCallers);
    for (int i = 0; i < kCallers; ++i) {
      callers.emplace_back([&] {
        start.enter();
        run(kLarge, [&](int64_t, int64_t, int64_t, bool) {
          meeting.enter();
          std::this_thread::sleep_for(std::chrono::microseconds(200));
          meeting.leave();
        });
      });
    }
    for (auto& caller : callers) {
      caller.join();
    }
    ASSERT_LE(meeting.most(), kNumThreads + kCallers - 1);
  }
  // All threads are released again.
  Rendezvous after(kNumThreads);
  run(kLarge, [&](int64_t, int64_t, int64_t, bool) {
    after.enter();
    after.leave();
  });
#ifndef __SANITIZE_THREAD__
  EXPECT_EQ(after.most(), kNumThreads);
#endif
}

TEST(ParallelTest, StreamsOnlyWhatExceedsTheCaches) {
  const auto streams = [](const std::vector<Work>& jobs) {
    std::set<bool> flags;
    std::mutex mutex;
    run(jobs, [&](int64_t, int64_t, int64_t, bool stream) {
      const std::lock_guard lock(mutex);
      flags.insert(stream);
    });
    EXPECT_EQ(flags.size(), 1) << "one flag for the whole call";
    return *flags.begin();
  };
  constexpr int64_t kGiB = int64_t{1} << 30;
  for (const int num_threads : {1, 4}) {
    const NumThreads guard(num_threads);
    EXPECT_FALSE(streams({{1000, 4}}));
    EXPECT_FALSE(streams({{1 << 18, 4}}));
    // Larger than any cache.
    EXPECT_TRUE(streams({{64, kGiB}}));
    EXPECT_TRUE(streams({{1, 4}, {32, kGiB}, {0, 4}, {32, kGiB}}));
    EXPECT_TRUE(streams(std::vector<Work>(1000, {1 << 10, 1 << 16})));
  }
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
// OpenMP in the child waits for threads of the parent process.
TEST(ParallelTest, AForkedChildStaysOnItsThread) {
  const NumThreads guard(2);
  run(kLarge, [](int64_t, int64_t, int64_t, bool) {});
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    const auto self = std::this_thread::get_id();
    bool stayed = true;
    run(kLarge, [&](int64_t, int64_t, int64_t, bool) {
      stayed = stayed && std::this_thread::get_id() == self;
    });
    _exit(stayed ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status)) << "the child was killed: it hung";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "the child used other threads";
}
#endif

} // namespace
} // namespace torchkv

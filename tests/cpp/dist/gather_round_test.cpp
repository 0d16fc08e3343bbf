#include "dist/gather_round.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/errors.h"
#include "dist/rendezvous.h"

namespace torchkv::dist {
namespace {

using Contributions = std::vector<GatherRound::Contribution>;

constexpr double kLong = 60;
constexpr double kShort = 0.1;

class GatherRoundTest : public ::testing::Test {
 protected:
  std::unique_ptr<GatherRound> begin(
      int32_t rank,
      int32_t num_ranks,
      double timeout,
      int64_t num_bytes = 0,
      GatherRound::Check check = [] {},
      int64_t stage = 0) {
    return std::make_unique<GatherRound>(
        "save",
        rendezvous_,
        "test/",
        GatherRound::Ranks{rank, num_ranks, timeout},
        GatherRound::Contribution{stage, num_bytes, rank == 0},
        std::move(check));
  }

 private:
  const std::shared_ptr<Rendezvous> rendezvous_ =
      make_rendezvous(c10::make_intrusive<c10d::HashStore>());
};

// Calls the function for each rank, on a thread each.
template <class Function>
void on_ranks(int32_t num_ranks, const Function& function) {
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(num_ranks));
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&function, rank] { function(rank); });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

std::string error_of_timeout(const std::function<void()>& function) {
  try {
    function();
  } catch (const StoreTimeoutError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

TEST_F(GatherRoundTest, AllRanksHearTheSame) {
  on_ranks(3, [&](int32_t rank) {
    int64_t last = 0;
    for (int64_t i = 0; i < 5; ++i) {
      const auto round = begin(rank, 3, kLong, 10 * i + rank);
      EXPECT_GT(round->number(), last);
      last = round->number();
      const Contributions& all = round->contributions();
      ASSERT_EQ(all.size(), 3U);
      for (int32_t other = 0; other < 3; ++other) {
        const auto& each = all[static_cast<size_t>(other)];
        EXPECT_EQ(each.num_bytes, 10 * i + other);
        EXPECT_EQ(each.has_store, other == 0);
      }
      round->meet();
    }
  });
}

TEST_F(GatherRoundTest, OneRankIsARound) {
  for (int i = 0; i < 2; ++i) {
    begin(0, 1, kShort)->meet();
  }
}

TEST_F(GatherRoundTest, TheErrorNamesWhoDoesNotBegin) {
  on_ranks(3, [&](int32_t rank) {
    if (rank == 0) {
      expect_contains(
          error_of_timeout([&] { begin(0, 3, 1); }), "waited for rank 1.");
    } else if (rank == 2) { // later, so that rank 0 has given up
      expect_contains(
          error_of_timeout([&] { begin(2, 3, 2); }), "waited for ranks 0, 1.");
    }
  });
}

TEST_F(GatherRoundTest, TheErrorNamesWhoDoesNotMeet) {
  on_ranks(3, [&](int32_t rank) {
    const auto round = begin(rank, 3, 1);
    if (rank != 2) {
      expect_contains(error_of_timeout([&] { round->meet(); }), "rank 2");
    }
  });
}

TEST_F(GatherRoundTest, WhoHasGivenUpIsNotWaitedFor) {
  EXPECT_THROW(begin(1, 2, kShort), StoreTimeoutError);
  expect_contains(error_of_timeout([&] { begin(0, 2, kShort); }), "rank 1");
}

TEST_F(GatherRoundTest, AnErrorOfTheCheckEndsTheWait) {
  const auto fail = [] { throw std::runtime_error("lost"); };
  EXPECT_THROW(begin(1, 2, kLong, 0, fail), std::runtime_error);
  EXPECT_THROW(begin(0, 2, kLong, 0, fail), std::runtime_error);
  on_ranks(2, [&](int32_t rank) { begin(rank, 2, kLong)->meet(); });
}

// Rank 0 meets, leaves the round and fails while rank 1 looks for failures.
TEST_F(GatherRoundTest, AFailureAfterAllHaveMetIsNotOfTheRound) {
  std::promise<void> waits;
  std::promise<void> met;
  on_ranks(2, [&](int32_t rank) {
    if (rank == 0) {
      const auto round = begin(0, 2, kLong);
      waits.get_future().wait();
      round->meet();
      met.set_value();
      return;
    }
    bool is_in_round = false;
    const auto round = begin(1, 2, kLong, 0, [&] {
      if (is_in_round) {
        waits.set_value();
        met.get_future().wait();
        throw std::runtime_error("rank 0 has failed");
      }
    });
    is_in_round = true;
    EXPECT_NO_THROW(round->meet());
  });
}

TEST_F(GatherRoundTest, WhoIsAtALaterStageHearsOfARankThatBeginsAgain) {
  std::atomic<int> num_refused{0};
  on_ranks(3, [&](int32_t rank) {
    if (rank != 1) {
      try {
        begin(rank, 3, kLong, 0, [] {}, 2);
      } catch (const RemoteError& error) {
        ++num_refused;
        expect_contains(error.what_without_backtrace(), "rank 1 has left");
      }
    }
    const auto round = begin(rank, 3, kLong); // rank 1 still waits in its first
    round->meet();
  });
  EXPECT_EQ(num_refused, 2);
}

// Ranks give up at any moment, and begin anew until they have met often enough:
// who has met in a round has heard what the others have.
TEST_F(GatherRoundTest, RanksThatGiveUpMeetAgain) {
  constexpr int32_t kRanks = 3;
  constexpr int kRounds = 30;
  std::mutex mutex;
  std::map<int64_t, std::vector<int64_t>> met; // by round: what was heard
  std::atomic<int> num_done{0};
  on_ranks(kRanks, [&](int32_t rank) {
    std::mt19937 random(static_cast<uint32_t>(rank));
    int num_met = 0;
    int64_t said = rank;
    const auto sometimes = [&] {
      if (random() % 40 == 0) {
        throw std::runtime_error("interrupted");
      }
    };
    while (num_done < kRanks) {
      said += kRanks;
      try {
        const auto round = begin(rank, kRanks, kShort, said, sometimes);
        std::vector<int64_t> heard;
        for (const auto& each : round->contributions()) {
          heard.push_back(each.num_bytes);
        }
        EXPECT_EQ(heard[static_cast<size_t>(rank)], said);
        {
          const std::lock_guard lock(mutex);
          const auto known = met.emplace(round->number(), heard);
          EXPECT_EQ(known.first->second, heard);
        }
        sometimes();
        round->meet();
        num_done += ++num_met == kRounds ? 1 : 0;
      } catch (const StoreTimeoutError&) {
        continue;
      } catch (const std::runtime_error&) {
        continue;
      }
    }
  });
  EXPECT_GE(met.size(), static_cast<size_t>(kRounds));
}

} // namespace
} // namespace torchkv::dist

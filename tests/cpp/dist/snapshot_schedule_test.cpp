// When snapshots are due: after which pushes of which keys.
#include "dist/snapshot_schedule.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

namespace torchkv::dist {
namespace {

constexpr std::optional<int64_t> kNot;

SnapshotSchedule every(int64_t rounds) {
  StoreOptions options;
  options.snapshot_rounds = rounds;
  return SnapshotSchedule(options);
}

TEST(SnapshotScheduleTest, NeverWithoutAnInterval) {
  SnapshotSchedule schedule = every(0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(schedule.due(1), kNot);
  }
}

TEST(SnapshotScheduleTest, AfterSoManyStepsOfAListOfKeys) {
  SnapshotSchedule schedule = every(2);
  const std::vector<std::optional<int64_t>> expected{kNot, 2, kNot, 4, kNot};
  for (const auto& step : expected) {
    EXPECT_EQ(schedule.due({1, 2, 3}), step);
  }
}

TEST(SnapshotScheduleTest, AfterTheLastKeyOfAStep) {
  SnapshotSchedule schedule = every(2);
  for (const int64_t step : {0, 2, 0, 4, 0, 6}) {
    EXPECT_EQ(schedule.due(1), kNot);
    EXPECT_EQ(schedule.due(2), kNot);
    EXPECT_EQ(schedule.due(3), step == 0 ? kNot : std::optional(step));
  }
}

TEST(SnapshotScheduleTest, AKeyThatIsNoLongerPushedDelaysItByAStep) {
  SnapshotSchedule schedule = every(2);
  EXPECT_EQ(schedule.due({1, 2}), kNot);
  EXPECT_EQ(schedule.due(1), kNot); // 2 is missing
  EXPECT_EQ(schedule.due(1), std::optional<int64_t>(3));
  EXPECT_EQ(schedule.due(1), kNot);
  EXPECT_EQ(schedule.due(1), std::optional<int64_t>(5));
}

TEST(SnapshotScheduleTest, AKeyMayBeginLater) {
  SnapshotSchedule schedule = every(4);
  for (int step = 1; step <= 5; ++step) {
    EXPECT_EQ(schedule.due(1), step == 4 ? std::optional<int64_t>(4) : kNot);
  }
  for (int step = 6; step <= 12; ++step) {
    EXPECT_EQ(
        schedule.due({1, 2}),
        step % 4 == 0 ? std::optional<int64_t>(step) : kNot);
  }
}

TEST(SnapshotScheduleTest, KeysMayBePushedInSomeStepsOnly) {
  SnapshotSchedule schedule = every(3);
  int num_due = 0;
  for (int step = 0; step < 30; ++step) {
    num_due += schedule.due(1) != kNot ? 1 : 0;
    if (step % 2 == 0) {
      num_due += schedule.due(2) != kNot ? 1 : 0;
    }
  }
  EXPECT_GE(num_due, 7);
}

TEST(SnapshotScheduleTest, AKeyThatACallRepeatsCountsOnce) {
  SnapshotSchedule schedule = every(2);
  for (const int64_t step : {0, 2, 0, 4}) {
    EXPECT_EQ(schedule.due({1, 1, 2}), step == 0 ? kNot : std::optional(step));
  }
}

} // namespace
} // namespace torchkv::dist

// When snapshots are due: before or after which pushes of which keys.
#include "dist/snapshot_schedule.h"

#include <gtest/gtest.h>

#include <optional>
#include <utility>

namespace torchkv::dist {
namespace {

using Step = std::optional<int64_t>;
using Steps = std::pair<Step, Step>; // of snapshots before and after a push

constexpr Step kNone;
const Steps kNot;

Steps before(int64_t step) {
  return {step, kNone};
}

Steps after(int64_t step) {
  return {kNone, step};
}

SnapshotSchedule every(int64_t rounds) {
  StoreOptions options;
  options.snapshot_rounds = rounds;
  return SnapshotSchedule(options);
}

Steps push(SnapshotSchedule& schedule, const Keys& keys) {
  const Step step = schedule.due_before(keys);
  return {step, schedule.due_after(keys)};
}

TEST(SnapshotScheduleTest, NeverWithoutAnInterval) {
  SnapshotSchedule schedule = every(0);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(push(schedule, 1), kNot);
  }
}

TEST(SnapshotScheduleTest, AfterSoManyStepsOfAListOfKeys) {
  SnapshotSchedule schedule = every(2);
  for (int64_t step = 1; step <= 5; ++step) {
    EXPECT_EQ(push(schedule, {1, 2, 3}), step % 2 == 0 ? after(step) : kNot);
  }
}

TEST(SnapshotScheduleTest, AfterTheLastKeyOfAStep) {
  SnapshotSchedule schedule = every(2);
  for (int64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(push(schedule, 1), kNot);
    EXPECT_EQ(push(schedule, 2), kNot);
    EXPECT_EQ(push(schedule, 3), step % 2 == 0 ? after(step) : kNot);
  }
}

TEST(SnapshotScheduleTest, AStepThatLacksAKeyHasEndedBeforeTheNext) {
  SnapshotSchedule schedule = every(2);
  EXPECT_EQ(push(schedule, {1, 2}), kNot);
  EXPECT_EQ(push(schedule, 1), kNot); // 2 is missing
  EXPECT_EQ(push(schedule, 1), before(2));
  EXPECT_EQ(push(schedule, 1), kNot);
  EXPECT_EQ(push(schedule, 1), before(4));
}

TEST(SnapshotScheduleTest, AKeyMayBeginLater) {
  SnapshotSchedule schedule = every(4);
  for (int64_t step = 1; step <= 12; ++step) {
    EXPECT_EQ(
        step <= 5 ? push(schedule, 1) : push(schedule, {1, 2}),
        step % 4 == 0 ? after(step) : kNot);
  }
}

TEST(SnapshotScheduleTest, KeysMayBePushedInSomeStepsOnly) {
  SnapshotSchedule schedule = every(3);
  for (int64_t step = 1; step <= 30; ++step) {
    EXPECT_EQ(
        push(schedule, 1), step > 1 && step % 6 == 1 ? before(step - 1) : kNot);
    if (step % 2 == 1) {
      EXPECT_EQ(push(schedule, 2), step % 6 == 3 ? after(step) : kNot);
    }
  }
}

// No step ever pushes all keys of the one before.
TEST(SnapshotScheduleTest, KeysMayChangeFromStepToStep) {
  SnapshotSchedule schedule = every(2);
  EXPECT_EQ(push(schedule, {0, 1}), kNot);
  for (int64_t step = 2; step <= 9; ++step) {
    EXPECT_EQ(
        push(schedule, {step - 1, step}),
        step >= 3 && step % 2 == 1 ? before(step - 1) : kNot);
  }
}

TEST(SnapshotScheduleTest, ListsOfChangingKeysMayBePushedOneAfterTheOther) {
  SnapshotSchedule schedule = every(2);
  for (int64_t step = 1; step <= 9; ++step) {
    EXPECT_EQ(
        push(schedule, {1, 2}),
        step >= 3 && step % 2 == 1 ? before(step - 1) : kNot);
    EXPECT_EQ(push(schedule, {100 + step, 200 + step}), kNot);
  }
}

TEST(SnapshotScheduleTest, AKeyThatACallRepeatsCountsOnce) {
  SnapshotSchedule schedule = every(2);
  for (int64_t step = 1; step <= 4; ++step) {
    EXPECT_EQ(push(schedule, {1, 1, 2}), step % 2 == 0 ? after(step) : kNot);
  }
}

} // namespace
} // namespace torchkv::dist

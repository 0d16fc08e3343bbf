// Schedules by name, as C++ and TorchScript programs set them. Their values and
// the refusals of Python are in tests/test_lr_scheduler.py.
#include "update/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "error_text.h"
#include "optimizer_helpers.h"

namespace torchkv {
namespace {

using testing::has;
using testing::value_of;

NumbersByName factor(double step, double factor) {
  return {
      {"lr_scheduler", 1},
      {"lr_scheduler.base_lr", 1},
      {"lr_scheduler.step", step},
      {"lr_scheduler.factor", factor}};
}

std::string refusal(const NumbersByName& numbers) {
  return testing::error_text([&] { make_schedule("test", numbers); });
}

TEST(ScheduleTest, NumbersRoundTrip) {
  EXPECT_EQ(make_schedule("test", {}).kind, Schedule::Kind::kNone);
  EXPECT_TRUE(numbers_of(Schedule()).empty());
  const std::vector<NumbersByName> cases{
      factor(3, 0.5),
      {{"lr_scheduler", 2},
       {"lr_scheduler.step.0", 2},
       {"lr_scheduler.step.1", 5}},
      {{"lr_scheduler", 3},
       {"lr_scheduler.max_update", 9},
       {"lr_scheduler.pwr", 3},
       {"lr_scheduler.warmup_steps", 2},
       {"lr_scheduler.warmup_mode", 1}},
      {{"lr_scheduler", 4},
       {"lr_scheduler.max_update", 9},
       {"lr_scheduler.final_lr", 0.001}}};
  for (const auto& given : cases) {
    const Schedule schedule = make_schedule("test", given);
    const NumbersByName numbers = numbers_of(schedule);
    for (const auto& [name, value] : given) {
      EXPECT_EQ(numbers.at(name), value) << name;
    }
    const Schedule again = make_schedule("test", numbers);
    EXPECT_EQ(numbers_of(again), numbers);
    for (int64_t n = 0; n < 12; ++n) {
      EXPECT_EQ(again.rate(n), schedule.rate(n)) << n;
    }
  }
}

TEST(ScheduleTest, TheWarmUpEndsAtTheFirstRateUnlessSaidOtherwise) {
  NumbersByName numbers = factor(100, 0.5);
  numbers["lr_scheduler.warmup_steps"] = 4;
  EXPECT_EQ(make_schedule("test", numbers).rate(2), 0.5);
  numbers["lr_scheduler.warmup_final_lr"] = 8;
  EXPECT_EQ(make_schedule("test", numbers).rate(2), 4);
  EXPECT_EQ(make_schedule("test", numbers).rate(4), 1);
}

TEST(ScheduleTest, Refusals) {
  EXPECT_TRUE(has(refusal({{"lr_scheduler", 0}}), "to be 1 (factor)"));
  EXPECT_TRUE(has(refusal({{"lr_scheduler", 1.5}}), "but got 1.5"));
  EXPECT_TRUE(has(refusal({{"lr_scheduler", double(NAN)}}), "but got nan"));
  EXPECT_TRUE(
      has(refusal({{"lr_scheduler.step", 1}}),
          "expected lr_scheduler, as there is 'lr_scheduler.step'"));
  NumbersByName numbers = factor(1, 0.5);
  numbers["lr_scheduler.pwr"] = 2;
  EXPECT_TRUE(has(refusal(numbers), "'lr_scheduler.pwr'"));
  EXPECT_TRUE(has(refusal(factor(1, NAN)), "lr_scheduler.factor"));
  EXPECT_TRUE(has(refusal(factor(1e300, 1)), "lr_scheduler.step"));
  EXPECT_TRUE(has(refusal({{"lr_scheduler", 2}}), "at least one"));
}

TEST(ScheduleTest, CountsOfUpdatesDoNotOverflow) {
  Optimizer lbsgd = make_optimizer(
      "test", "mxnet_lbsgd", {{"batch_scale", 1e30}, {"begin_num_update", 5}});
  EXPECT_EQ(lbsgd.num_updates(0), 5);
  EXPECT_EQ(lbsgd.num_updates(int64_t{1} << 53U), int64_t{1} << 53U);
}

TEST(ScheduleTest, IsAnOptionOfAnOptimizerByName) {
  const auto store = c10::make_intrusive<KVStore>();
  store->init(3, at::zeros(1));
  NumbersByName numbers = factor(1, 0.5);
  numbers["begin_num_update"] = 1;
  store->set_optimizer("sgd", numbers);
  store->push(3, at::ones(1)); // update 2
  store->push(3, at::ones(1));
  EXPECT_EQ(value_of(store, 3).item<float>(), -0.75);
  EXPECT_EQ(store->num_steps(), 2);
  numbers["begin_num_update"] = 0.5;
  EXPECT_THROW(store->set_optimizer("sgd", numbers), c10::ValueError);
}

} // namespace
} // namespace torchkv

#include "schedule.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>

#include "../core/errors.h"
#include "../core/text.h"

namespace torchkv {
namespace {

using Kind = Schedule::Kind;

constexpr double kPi = 3.14159265358979323846;

struct RealNumber {
  const char* name;
  double Schedule::* member;
};
struct WholeNumber {
  const char* name;
  int64_t Schedule::* member;
  int64_t least;
};

// Those of every kind first, then those of some.
constexpr RealNumber kReal[] = {
    {"base_lr", &Schedule::base_lr},
    {"warmup_begin_lr", &Schedule::warmup_begin_lr},
    {"warmup_final_lr", &Schedule::warmup_final_lr},
    {"factor", &Schedule::factor},
    {"stop_factor_lr", &Schedule::stop_factor_lr},
    {"final_lr", &Schedule::final_lr},
    {"pwr", &Schedule::power},
};
constexpr WholeNumber kWhole[] = {
    {"warmup_steps", &Schedule::warmup_steps, 0},
    {"step", &Schedule::step, 1},
    {"max_update", &Schedule::max_update, 1},
};
constexpr auto* kWarmupMode = "warmup_mode"; // 0: linear, 1: constant
constexpr auto* kSteps = "step.";

bool has(Kind kind, const std::string& name) {
  if (name == "factor") {
    return kind == Kind::kFactor || kind == Kind::kMultiFactor;
  }
  if (name == "step" || name == "stop_factor_lr") {
    return kind == Kind::kFactor;
  }
  if (name == "max_update" || name == "final_lr") {
    return kind == Kind::kPoly || kind == Kind::kCosine;
  }
  return name != "pwr" || kind == Kind::kPoly;
}

std::string full(const std::string& name) {
  return c10::str(kScheduleName, '.', name);
}

void check(const char* op, const Schedule& schedule) {
  for (const auto& number : kReal) {
    const double value = schedule.*number.member;
    TORCH_CHECK_VALUE(
        value >= 0 && is_finite_float(value),
        op,
        ": expected a ",
        full(number.name),
        " of at least 0 that is finite in fp32, but got ",
        value);
  }
  TORCH_CHECK_VALUE(
      schedule.factor <= 1,
      op,
      ": expected ",
      full("factor"),
      " to be at most 1, but got ",
      schedule.factor);
  TORCH_CHECK_VALUE(
      schedule.warmup_begin_lr <= schedule.warmup_final_lr,
      op,
      ": expected ",
      full("warmup_begin_lr"),
      " to be at most the rate after the warm-up, ",
      schedule.warmup_final_lr,
      ", but got ",
      schedule.warmup_begin_lr);
  const bool has_end =
      schedule.kind == Kind::kPoly || schedule.kind == Kind::kCosine;
  TORCH_CHECK_VALUE(
      !has_end || schedule.warmup_steps < schedule.max_update,
      op,
      ": expected ",
      full("warmup_steps"),
      " to be less than max_update, ",
      schedule.max_update,
      ", but got ",
      schedule.warmup_steps);
  TORCH_CHECK_VALUE(
      schedule.kind != Kind::kMultiFactor || !schedule.steps.empty(),
      op,
      ": expected at least one ",
      full("step"));
  const auto& steps = schedule.steps;
  TORCH_CHECK_VALUE(
      std::adjacent_find(steps.begin(), steps.end(), std::greater_equal<>()) ==
          steps.end(),
      op,
      ": expected each ",
      full("step"),
      " to be greater than the one before");
}

} // namespace

double Schedule::rate(int64_t num_updates) const {
  const auto n = static_cast<double>(num_updates);
  if (num_updates < warmup_steps) {
    const double part = n / static_cast<double>(warmup_steps);
    return is_warmup_constant
        ? warmup_begin_lr
        : warmup_begin_lr + ((warmup_final_lr - warmup_begin_lr) * part);
  }
  if (kind == Kind::kFactor) {
    const int64_t times = num_updates == 0 ? 0 : (num_updates - 1) / step;
    const double rate = base_lr * std::pow(factor, static_cast<double>(times));
    return times == 0 ? rate : std::max(rate, stop_factor_lr);
  }
  if (kind == Kind::kMultiFactor) {
    const auto times =
        std::lower_bound(steps.begin(), steps.end(), num_updates) -
        steps.begin();
    return base_lr * std::pow(factor, static_cast<double>(times));
  }
  if (num_updates > max_update) {
    return final_lr;
  }
  const double part = static_cast<double>(num_updates - warmup_steps) /
      static_cast<double>(max_update - warmup_steps);
  const double share = kind == Kind::kPoly ? std::pow(1 - part, power)
                                           : (1 + std::cos(kPi * part)) / 2;
  return final_lr + ((base_lr - final_lr) * share);
}

double Schedule::largest_rate() const {
  return kind == Kind::kNone
      ? 0
      : std::max({base_lr, warmup_final_lr, stop_factor_lr, final_lr});
}

bool is_of_schedule(const std::string& name) {
  return name.rfind(kScheduleName, 0) == 0;
}

Schedule make_schedule(const char* op, const NumbersByName& numbers) {
  Schedule schedule;
  if (numbers.empty()) {
    return schedule;
  }
  const auto kind = numbers.find(kScheduleName);
  TORCH_CHECK_VALUE(
      kind != numbers.end(),
      op,
      ": expected ",
      kScheduleName,
      ", as there is ",
      quoted(numbers.begin()->first));
  constexpr auto kLast = static_cast<double>(Kind::kCosine);
  TORCH_CHECK_VALUE(
      kind->second >= 1 && kind->second <= kLast &&
          kind->second == std::floor(kind->second),
      op,
      ": expected ",
      kScheduleName,
      " to be 1 (factor), 2 (several factors), 3 (polynomial) or 4 (cosine), "
      "but got ",
      kind->second);
  schedule.kind = static_cast<Kind>(static_cast<int>(kind->second));
  NumbersByName others = numbers;
  others.erase(kScheduleName);
  const auto take = [&](const std::string& name) -> std::optional<double> {
    const auto found = others.find(full(name));
    if (found == others.end() || !has(schedule.kind, name)) {
      return std::nullopt;
    }
    const double value = found->second;
    others.erase(found);
    return value;
  };
  for (const auto& number : kReal) {
    if (const auto value = take(number.name)) {
      schedule.*number.member = *value;
    } else if (number.member == &Schedule::warmup_final_lr) {
      schedule.warmup_final_lr = schedule.base_lr;
    }
  }
  for (const auto& number : kWhole) {
    if (const auto value = take(number.name)) {
      schedule.*number.member =
          whole_number(op, full(number.name), *value, number.least);
    }
  }
  if (const auto mode = take(kWarmupMode)) {
    schedule.is_warmup_constant = *mode != 0;
  }
  while (schedule.kind == Kind::kMultiFactor) {
    const std::string name = c10::str(kSteps, schedule.steps.size());
    const auto value = take(name);
    if (!value) {
      break;
    }
    schedule.steps.push_back(whole_number(op, full(name), *value, 1));
  }
  TORCH_CHECK_VALUE(
      others.empty(),
      op,
      ": unknown option of the schedule, ",
      quoted(others.begin()->first));
  check(op, schedule);
  return schedule;
}

NumbersByName numbers_of(const Schedule& schedule) {
  NumbersByName numbers;
  if (schedule.kind == Kind::kNone) {
    return numbers;
  }
  numbers[kScheduleName] = static_cast<double>(schedule.kind);
  for (const auto& number : kReal) {
    if (has(schedule.kind, number.name)) {
      numbers[full(number.name)] = schedule.*number.member;
    }
  }
  for (const auto& number : kWhole) {
    if (has(schedule.kind, number.name)) {
      numbers[full(number.name)] = static_cast<double>(schedule.*number.member);
    }
  }
  numbers[full(kWarmupMode)] = schedule.is_warmup_constant ? 1 : 0;
  for (size_t i = 0; i < schedule.steps.size(); ++i) {
    numbers[full(c10::str(kSteps, i))] = static_cast<double>(schedule.steps[i]);
  }
  return numbers;
}

} // namespace torchkv

#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../core/export.h"
#include "../core/rule.h"

namespace torchkv {

// A learning rate that depends on the number of updates: the formulas and names
// of mxnet.lr_scheduler 1.9.1. Plain data, as RuleSpec.
struct Schedule {
  enum class Kind : uint8_t { kNone, kFactor, kMultiFactor, kPoly, kCosine };

  Kind kind = Kind::kNone;
  double base_lr = 0.01; // without warm-up, that of update 0
  // Updates less than this number are the warm-up: the rate grows from
  // warmup_begin_lr to warmup_final_lr, or stays at warmup_begin_lr.
  int64_t warmup_steps = 0;
  double warmup_begin_lr = 0;
  double warmup_final_lr = 0.01;
  bool is_warmup_constant = false;
  // kFactor: a factor after each `step` updates, down to stop_factor_lr;
  // kMultiFactor: after each of `steps`, in ascending order.
  double factor = 1;
  int64_t step = 1;
  double stop_factor_lr = 1e-8;
  std::vector<int64_t> steps;
  // kPoly, kCosine: the rate is final_lr from max_update on.
  int64_t max_update = 1;
  double final_lr = 0;
  double power = 2; // kPoly

  // REQUIRES: a kind; num_updates >= 0.
  TORCHKV_API double rate(int64_t num_updates) const;
  // No rate is greater; 0 without a kind.
  TORCHKV_API double largest_rate() const;
};

// Names of numbers begin with this: "lr_scheduler" is the kind, from 1;
// "lr_scheduler.base_lr" and so on have MXNet's names, "lr_scheduler.step.0" is
// the first of `steps`.
inline constexpr auto* kScheduleName = "lr_scheduler";
TORCHKV_API bool is_of_schedule(const std::string& name);

// No numbers: no schedule. Numbers that are not given have MXNet's defaults.
// ValueError for an unknown name and for what MXNet refuses.
TORCHKV_API Schedule
make_schedule(const char* op, const NumbersByName& numbers);
TORCHKV_API NumbersByName numbers_of(const Schedule& schedule);

} // namespace torchkv

#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../../core/rule.h"
#include "lines.h"
#include "norms.h"

namespace torchkv::kernels::cpu {

// The second pass of a rule that is_lamb() on a dense line, whose state the sum
// has updated: the weights move along their direction by the ratio of the
// norms.
class LambLine {
 public:
  LambLine(
      const RuleStep& step,
      c10::ScalarType dtype,
      char* stored,
      const StateLine& state);

  // Numbers are multiplied by their scale before they are squared.
  Norms squared_norms(int64_t num_elements, const Norms& scales) const;
  // By the norms of the whole value.
  void move(const Norms& norms, int64_t num_elements) const;

 private:
  template <typename T>
  T* weights() const;

  const RuleStep& step_;
  c10::ScalarType dtype_;
  c10::ScalarType arithmetic_;
  char* stored_;
  StateLine state_;
};

} // namespace torchkv::kernels::cpu

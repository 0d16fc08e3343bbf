#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../../core/rule.h"
#include "lines.h"

namespace torchkv::kernels::cpu {

// The second half of LAMB on a line without gaps, whose state the sum has moved
// on already: the weights move along their direction by the ratio of norms.
class LambLine {
 public:
  struct Norms {
    double weight = 0;
    double direction = 0;

    // From the norms of a whole value, their ratio.
    double trust() const;
  };

  LambLine(
      const RuleStep& step,
      c10::ScalarType dtype,
      char* stored,
      const StateLine& state);

  // Each number is multiplied by its scale before it is squared.
  Norms squared_norms(int64_t num_elements, const Norms& scales) const;
  void move(double trust, int64_t num_elements) const;

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

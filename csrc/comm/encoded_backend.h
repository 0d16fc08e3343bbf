#pragma once

#include <ATen/core/Tensor.h>

#include <list>

#include "backends.h"

namespace torchkv {

// What the backends of encoded values have in common. Sums: a batch that adds
// up those in CPU memory and steps with them in one pass.
template <class Sums>
class EncodedBackend : public Backend {
 public:
  explicit EncodedBackend(Backends& backends) : backends_(backends) {}

  bool add_copy(const Slice& /*source*/, const at::Tensor& /*out*/) override {
    return false; // stored values are dense
  }
  void run() override {
    sums_.run();
  }
  double squared_norm(double scale) override {
    return sums_.squared_norm(scale);
  }

 protected:
  virtual void add_sum(const Job& job) = 0; // to sums_

  // For rules that Sums cannot step with: adds up the job's values into a dense
  // value, with which other backends, which run later, step.
  void add_dense_step(const Job& job) {
    const at::Tensor& total =
        tensors_.emplace_back(backends_.order().runtime().allocate_like(
            *job.result, job.accumulation));
    Job sum = job;
    sum.result = &total;
    sum.step = &kAssignStep;
    sum.is_norm = false;
    add_sum(sum);
    const Value value(&total);
    Job summed = job;
    summed.values = value;
    backends_.add(summed);
  }

  Backends& backends_;
  Sums sums_;
  std::list<at::Tensor> tensors_; // that jobs point to
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <type_traits>

#include "../core/rule.h"
#include "../core/value.h"
#include "../memory/entry.h"

namespace torchkv {

struct RowsOfWeight;

// A sum on the home device of a slice, or a step of an optimizer with the sum
// as its gradient: result = rule(result, values[0] + values[1] + ...). Values
// are added left to right in `accumulation`, and the sum is rounded once.
//
// If `is_norm`, the squares of the gradient's elements, as the rule would see
// them without RuleStep::last_scale, count in Backend::squared_norm() instead,
// and nothing is written.
struct Job {
  const Entry* entry = nullptr;
  const Slice* slice = nullptr; // its home; for a step also its state
  // At least one. The tensors have the shape of `result`.
  c10::ArrayRef<Value> values;
  const at::Tensor* result = nullptr; // dense, on the home device
  c10::ScalarType accumulation = c10::kFloat;
  const RuleStep* step = &kAssignStep;
  bool is_norm = false;
  // If not null, all tensors are copies of these rows, and the rule's step
  // depends on what they are: a job for AtenBackend.
  const RowsOfWeight* rows = nullptr;
  // They get the result, too, and have its dtype and memory layout; all are in
  // CPU memory. None overlaps another tensor of the call, but for values of
  // this job that have the very memory of one. CpuBackend writes them in the
  // pass of the sum where it can; class Backends copies them for the others,
  // which see none.
  c10::ArrayRef<at::Tensor> outs = {};

  bool is_step() const {
    return !is_norm && step->rule.id != RuleSpec::Id::kAssign;
  }
  // Whether a step must first do what Slices::follow_writes does. Of rules that
  // are not elementwise, it has been done.
  bool follows_writes() const {
    return is_step() && entry->is_shared && slice->master.defined() &&
        is_elementwise(step->rule);
  }
  // Sets the memory of the state that a step uses: members of `state`. In
  // place: copied as a whole, pointers just written would stall the loads.
  template <typename State>
  void get_state(State& state) const {
    using T = std::remove_pointer_t<decltype(state.master)>;
    if (!is_step()) {
      return;
    }
    if (slice->master.defined()) {
      state.master = static_cast<T*>(slice->master.mutable_data_ptr());
    }
    state.follows_writes = follows_writes();
    auto& states = state.states;
    const auto names = state_names(step->rule);
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (names[i] != nullptr) {
        states[i] = static_cast<T*>(slice->states[i].mutable_data_ptr());
      }
    }
  }
};

// Of elements of a dtype: complex ones are two numbers.
inline uint64_t num_numbers(int64_t num_elements, c10::ScalarType dtype) {
  return static_cast<uint64_t>(num_elements) *
      (c10::isComplexType(dtype) ? 2 : 1);
}

// One implementation of the sums, steps and copies of a call. Backends are
// tried in order (Backends): add*() either accepts the work and returns true,
// or returns false and does nothing. So the decision, most of the host's time,
// is made once and cannot disagree with the work. The jobs of a call are norms,
// or none of them is.
//
// add*() may allocate and copy, but changes no stored value; run() does. What a
// job points to outlives run(), except the array of its values.
class Backend {
 public:
  virtual ~Backend() = default;

  virtual bool add(const Job& job) = 0;
  // Copies the value of a slice into an out of its shape.
  virtual bool add_copy(const Slice& source, const at::Tensor& out) = 0;

  virtual void run() = 0;
  // The sum of the squares of all norms, each number multiplied by `scale`
  // first. Blocks until it is known. The same bits for any number of threads.
  virtual double squared_norm(double scale) = 0;
};

} // namespace torchkv

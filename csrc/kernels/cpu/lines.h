#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <optional>

#include "../rules.h"
#include "access.h"
#include "dense_add.h"

namespace torchkv::kernels::cpu {

// The state of a rule from the first element of a line: fp32 or fp64 numbers
// (for complex ones, real and imaginary parts) in the order of the stored
// value's elements; null if not used.
struct StateLine {
  char* master = nullptr; // the unrounded stored value
  std::array<char*, kMaxStates> states{};
  // There is a master, and before the step it takes over the numbers of the
  // stored line to which its own do not round: others have written them.
  bool follows_writes = false;
  int64_t begin = 0; // elements of the stored tensor before the line

  // The state so many elements further on, of this size in bytes.
  StateLine at(int64_t num_elements, int64_t size) const {
    const auto moved = [&](char* data) {
      return data == nullptr ? nullptr : data + num_elements * size;
    };
    StateLine result;
    result.follows_writes = follows_writes;
    result.begin = begin + num_elements;
    result.master = moved(master);
    for (size_t i = 0; i < kMaxStates; ++i) {
      result.states[i] = moved(states[i]);
    }
    return result;
  }
};

// Copies `num_bytes` into each of `outs`, reading them once. `stream` bypasses
// the caches, and the caller must call end_stream() after the last write. An
// out may be `source` itself.
void copy_line(
    const char* source,
    c10::ArrayRef<char*> outs,
    int64_t num_bytes,
    bool stream);

// stored = rule(stored, values[0] + values[1] + ...), line by line, for fixed
// dtypes of the values and the stored value. One pass: values are added left to
// right in `accumulation` and rounded once to the stored dtype. The bits depend
// neither on the processor (except for the payload of a NaN) nor on how a
// tensor is split into lines.
//
// REQUIRES: at least one value; `accumulation` is the at::toOpMathType of a
// dtype to which all others convert; floating-point or complex dtypes for a
// rule other than ASSIGN. A line of values may be the stored line itself, but
// must not overlap it otherwise, nor the state. Any alignment. Any thread. The
// step outlives this.
class SumLine {
 public:
  // kDense skips look-ups that dense lines do not need.
  enum class Layout : uint8_t { kDense, kAny };

  SumLine(
      c10::ArrayRef<c10::ScalarType> values,
      c10::ScalarType stored,
      c10::ScalarType accumulation,
      const RuleStep& step,
      Layout layout);

  // Dense lines. `stream` bypasses the caches, for calls that move more than
  // they hold; the caller must call end_stream() after the last write.
  void dense(
      const char* const* values,
      char* stored,
      const StateLine& state,
      int64_t num_elements,
      bool stream) const;

  // The squared 2-norm of the gradients on a dense line as the rule sees them
  // before `last_scale`, each multiplied by `scale` in fp64.
  // REQUIRES: a rule other than ASSIGN.
  double squared_norm(
      const char* const* values,
      int64_t num_elements,
      double scale) const;

  // Strides in bytes; 0 repeats one value.
  // REQUIRES: Layout::kAny; a dense stored line if there is state.
  void strided(
      const char* const* values,
      const int64_t* value_strides,
      char* stored,
      int64_t stored_stride,
      const StateLine& state,
      int64_t num_elements) const;

 private:
  // A line, or the rest of one.
  struct Line {
    const char* const* values;
    const int64_t* strides; // of the values
    char* stored;
    int64_t stored_stride;
    const StateLine* state; // of the whole line
    int64_t num_elements;
    int64_t num_done = 0; // elements of the whole line before
  };
  struct SquaredNorm {
    double scale = 1; // of each number
    double sum = 0;
  };

  template <typename acc_t>
  double squares(acc_t* total, int64_t size, double scale) const;
  template <typename acc_t>
  void update_block(
      const acc_t* sum,
      acc_t* total,
      const Line& line,
      int64_t size) const;
  template <typename weight_t>
  void follow_writes(weight_t* master, const Line& line, int64_t size) const;
  template <typename acc_t, typename real_t>
  void update_block(
      const RuleNumbers<real_t>& numbers,
      const acc_t* sum,
      acc_t* total,
      const Line& line,
      int64_t size) const;
  template <typename acc_t>
  void sum_blocks(Line& line, bool stream, SquaredNorm* squared_norm) const;

  const RuleStep& step_;
  const c10::ScalarType stored_;
  const bool is_assign_;
  bool is_copy_ = false; // of dense lines: one value of the stored dtype
  int64_t stored_size_ = 0;
  c10::SmallVector<int64_t, 8> sizes_; // of the values' elements

  // The sum in registers: for ASSIGN and a single dtype.
  DenseAdd dense_add_;

  // The sum in blocks, for the accumulation type.
  void (SumLine::*sum_blocks_)(Line&, bool, SquaredNorm*) const = nullptr;
  c10::SmallVector<decltype(Access::load), 8> loads_;
  decltype(Access::store) store_ = nullptr;
  DenseAdd ready_add_; // if all values have the accumulation type

  // A rule in the arithmetic of the stored dtype: one of the two is set.
  std::optional<RuleNumbers<float>> numbers_float_;
  std::optional<RuleNumbers<double>> numbers_double_;
  Access weight_;
};

} // namespace torchkv::kernels::cpu

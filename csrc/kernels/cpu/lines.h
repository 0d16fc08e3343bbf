#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>
#include <optional>

#include "../rules.h"
#include "dense_add.h"

namespace torchkv::kernels::cpu {

// Where the state of a rule for a line begins: fp32 or fp64 numbers (real and
// imaginary parts, for complex ones) in the places of the stored value's
// elements; null where there is none.
struct StateLine {
  char* master = nullptr; // the weight itself, of a stored value that rounds it
  std::array<char*, kMaxStates> states{};
};

// stored = rule(stored, values[0] + values[1] + ...), line by line, for values
// and a stored value of fixed dtypes. One pass: added left to right in
// `accumulation`, rounded once to the stored dtype. The bits do not depend on
// the processor (except inside a NaN), nor on how a tensor is cut into lines.
//
// REQUIRES: at least one value; `accumulation` is what at::toOpMathType makes
// of a dtype to which all others convert; floating-point or complex, for a rule
// that is not ASSIGN. A line of values may be that of the stored value itself,
// but must not overlap it otherwise. Any alignment. Any thread. The rule
// outlives this.
class SumLine {
 public:
  // kDense saves a small sum the look-up of what it does not need.
  enum class Layout : uint8_t { kDense, kAny };

  SumLine(
      c10::ArrayRef<c10::ScalarType> values,
      c10::ScalarType stored,
      c10::ScalarType accumulation,
      const RuleStep& step,
      Layout layout);

  // Lines without gaps. `stream` writes past the caches: right where the call
  // moves more than they hold. The caller ends its writes with end_stream().
  void dense(
      const char* const* values,
      char* stored,
      const StateLine& state,
      int64_t num_elements,
      bool stream) const;

  // The squared 2-norm of the gradients on a line without gaps, as the rule
  // would see them but for `last_scale`, each multiplied by `scale` in fp64.
  // REQUIRES: a rule that is not ASSIGN.
  double squared_norm(
      const char* const* values,
      int64_t num_elements,
      double scale) const;

  // Lines of elements so many bytes apart; 0 repeats one value.
  // REQUIRES: Layout::kAny; a stored line without gaps where there is state.
  void strided(
      const char* const* values,
      const int64_t* value_strides,
      char* stored,
      int64_t stored_stride,
      const StateLine& state,
      int64_t num_elements) const;

 private:
  using AnyFunction = void (*)();
  using Sources = c10::SmallVector<const char*, 8>;
  struct SquaredNorm {
    double scale = 1; // of each number
    double sum = 0;
  };

  template <typename acc_t>
  void look_up(c10::ArrayRef<c10::ScalarType> values);
  void look_up_rule();
  template <typename acc_t>
  double squares(acc_t* total, int64_t size, double scale) const;
  template <typename acc_t>
  void update_block(
      acc_t* total,
      char* stored,
      int64_t stored_stride,
      StateLine& state,
      int64_t size) const;
  template <typename acc_t, typename real_t>
  void update_block(
      const RuleNumbers<real_t>& numbers,
      acc_t* total,
      char* stored,
      int64_t stored_stride,
      StateLine& state,
      int64_t size) const;
  template <typename acc_t>
  void sum_blocks(
      Sources sources,
      const int64_t* strides,
      char* stored,
      int64_t stored_stride,
      StateLine state,
      int64_t num_elements,
      bool stream,
      SquaredNorm* squared_norm) const;

  const RuleStep& step_;
  const c10::ScalarType stored_;
  const bool is_assign_;
  bool is_copy_ = false; // of dense lines: one value of the stored dtype
  int64_t stored_size_ = 0;
  c10::SmallVector<int64_t, 8> sizes_; // of the values' elements

  // The sum in registers, if this is one: ASSIGN and one dtype.
  DenseAdd dense_add_;

  // The sum in blocks. What the functions are depends on the accumulation type.
  void (SumLine::*sum_blocks_)(
      Sources sources,
      const int64_t* strides,
      char* stored,
      int64_t stored_stride,
      StateLine state,
      int64_t num_elements,
      bool stream,
      SquaredNorm* squared_norm) const = nullptr;
  c10::SmallVector<AnyFunction, 8> loads_;
  AnyFunction store_ = nullptr;
  DenseAdd ready_add_; // if all values have the accumulation type

  // A rule, in the arithmetic of the stored dtype: one of the numbers is set.
  std::optional<RuleNumbers<float>> numbers_float_;
  std::optional<RuleNumbers<double>> numbers_double_;
  AnyFunction load_weight_ = nullptr;
  AnyFunction store_weight_ = nullptr;
};

} // namespace torchkv::kernels::cpu

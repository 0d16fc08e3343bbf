#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../../core/export.h"
#include "params.h"

namespace torchkv::kernels::cuda {

// stored = rule(stored, values[0] + values[1] + ...) for one key, whose tensors
// are dense and have the same memory layout, on one device. A complex number
// counts as two elements.
struct SumJob {
  Dtype value = Dtype::kFloat;
  Dtype stored_dtype = Dtype::kFloat;
  // The first value is a partial sum, in the accumulation type of halves.
  bool first_is_sum = false;
  const void* const* values = nullptr;
  size_t num_values = 0;
  void* stored = nullptr;
  void* master = nullptr; // the unrounded stored value, if there is one
  std::array<void*, kMaxStates> states{};
  bool follows_writes = false; // as cpu::StateLine
  int64_t num_elements = 0;
  const RuleStep* step = &kAssignStep;
};

// The work of a call on one device, packed into as few launches as possible.
// Nothing is launched before finish(), when the caller knows what the launches
// must wait for. A key costs the host about ten nanoseconds.
//
// REQUIRES: no job writes what another job of the call reads or writes; a job's
// value may be its stored value. Steps and arrays of pointers are copied;
// device memory must stay valid until the work on the stream is done. Not
// thread-safe.
class TORCHKV_API Launches {
 public:
  // Whether there is a kernel for the job; ignores its pointers.
  static bool supports(const SumJob& job);

  // `params_limit`: the maximum size of a launch's parameters in bytes;
  // kSmallParams while the stream is captured.
  Launches(
      const Table& table,
      void* stream,
      size_t params_limit = kLargeParams);
  ~Launches();
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  // REQUIRES: supports(job), at least one value, and a rule without norms.
  void add(const SumJob& job);
  // A step of a rule that has_norms(). `numbers` are num_numbers(job) doubles,
  // which the launches write and read. REQUIRES: supports(job), at least one
  // value, not follows_writes.
  static int64_t num_numbers(const SumJob& job);
  void add_with_norms(const SumJob& job, double* numbers);
  // Copies `num_bytes` into each of the outs; one of them may be the source.
  void add_copy(
      const void* source,
      void* const* outs,
      size_t num_outs,
      int64_t num_bytes);

  // The sum of squares of the gradient as the rule sees it before last_scale,
  // each number multiplied by `scale` first: one double per chunk,
  // num_squares(job) in all, is written to `squares` instead of the stored
  // value. REQUIRES: supports_norm(job); one scale for all norms of the call.
  static bool supports_norm(const SumJob& job);
  static int64_t num_squares(const SumJob& job);
  void add_norm(const SumJob& job, double scale, double* squares);

  // Launches the added jobs and returns the first error, or 0; nothing is
  // launched after an error. REQUIRES: the device is the current one.
  int finish();

 private:
  struct Packed;

  // In the order of launches: a rule with norms measures, adds up and steps.
  enum class Kind : uint8_t {
    kSum,
    kSumOnSum,
    kNorm,
    kNormOnSum,
    kMeasure,
    kMeasureOnSum,
    kRate,
    kScaled,
    kScaledOnSum,
    kCopy,
  };

  // A launch of that kind with room for another key.
  Packed& packed(Kind kind, const Variant& variant, size_t num_pointers);
  void add(
      Kind kind,
      const Variant& variant,
      const SumJob& job,
      void* memory,
      double* numbers = nullptr);
  void add_rate(const SumJob& job, double* numbers);
  void launch(Packed& packed);

  const Table& table_;
  void* const stream_;
  const size_t params_limit_;
  double scale_ = 1; // of norms
  int error_ = 0;
  std::vector<std::unique_ptr<Packed>> packed_;
  Packed* last_ = nullptr; // the launch of the last key
};

} // namespace torchkv::kernels::cuda

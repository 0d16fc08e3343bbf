#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "../../export.h"
#include "params.h"

namespace torchkv::kernels::cuda {

// stored = rule(stored, values[0] + values[1] + ...) for one key, whose tensors
// are dense and alike in memory, on one device. A complex number counts as two
// elements.
struct SumJob {
  Dtype value = Dtype::kFloat;
  Dtype stored_dtype = Dtype::kFloat;
  // The first value is a sum already, of the type in which halves are added up.
  bool first_is_sum = false;
  const void* const* values = nullptr;
  size_t num_values = 0;
  void* stored = nullptr;
  void* master = nullptr; // the weight itself, where there is one
  std::array<void*, kMaxStates> states{};
  int64_t num_elements = 0;
  const RuleStep* step = &kAssignStep;
};

// The work of a call on one device, packed into as few launches as it takes,
// without waiting for any. What a key adds to an open launch costs the host
// some ten nanoseconds.
//
// REQUIRES: that device is the current one; no job writes what another job of
// the call reads or writes. A job's values may be what it stores. Steps and
// arrays of pointers are copied; memory of the device must stay until the work
// on the stream is done. Not for several threads.
class TORCHKV_API Launches {
 public:
  // Whether there is a kernel for the job; its pointers are not looked at.
  static bool supports(const SumJob& job);

  Launches(const Table& table, int num_multiprocessors, void* stream);
  ~Launches();
  Launches(const Launches&) = delete;
  Launches& operator=(const Launches&) = delete;

  // REQUIRES: supports(job), at least one value.
  void add(const SumJob& job);
  // Copies `num_bytes` into each of the outs; one of them may be the source.
  void add_copy(
      const void* source,
      void* const* outs,
      size_t num_outs,
      int64_t num_bytes);

  // Launches what is open. The first error of all launches, or 0; after one,
  // nothing more is launched.
  int finish();

 private:
  struct Open;

  enum class Kind : uint8_t { kSum, kSumOnSum, kCopy };

  // An open launch of that kind with room for another key.
  Open& open_launch(Kind kind, const Variant& variant, size_t num_pointers);
  void launch(Open& open);

  const Table& table_;
  const uint32_t num_multiprocessors_;
  void* const stream_;
  int error_ = 0;
  std::vector<std::unique_ptr<Open>> open_;
};

} // namespace torchkv::kernels::cuda

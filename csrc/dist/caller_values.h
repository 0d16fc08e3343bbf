#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <memory>
#include <shared_mutex>
#include <unordered_set>
#include <vector>

#include "../core/export.h"
#include "buffers.h"
#include "protocol/round.h"

namespace torchkv::dist {

// Values of callers that wait until they are merged: this process's server
// reads the callers' memory itself, not a copy of it, and writes the new values
// into their outs in the pass that makes them. A caller that returns earlier (a
// time-out, Ctrl-C) leaves a copy to the server. Thread-safe.
class TORCHKV_API CallerValues {
 public:
  CallerValues();

  // The values of one call. The caller does not write its tensors while it
  // exists.
  class OfCall {
   public:
    // Copies will be in `buffers`.
    OfCall(const CallerValues& values, Buffers buffers);
    // Copies the values unless they are merged; waits for an update that reads
    // them.
    ~OfCall();
    C10_DISABLE_COPY_AND_ASSIGN(OfCall);

    // The value's memory. REQUIRES: contiguous, on the CPU, not empty; of
    // `out`, which may be undefined, the same, the stored dtype, which is that
    // of the value, and what can_write_with_sums() says.
    Blob add(const at::Tensor& value, const at::Tensor& out = {});
    // All have been read.
    void set_merged() {
      are_merged_ = true;
    }
    // The owners of values that are in outs. REQUIRES: all have been merged.
    std::unordered_set<const void*> in_outs() const;

   private:
    const std::shared_ptr<struct CallersRegistry> registry_;
    const Buffers buffers_;
    std::vector<std::shared_ptr<struct CallerValue>> values_;
    bool are_merged_ = false;
  };

  // While it is held, callers do not return whose values the rounds read. Makes
  // the rounds refer to the copies of those that have returned.
  using Lock = std::shared_lock<std::shared_mutex>;
  Lock hold(c10::ArrayRef<RoundPtr> rounds) const;
  // The part of a caller's out that is to get a round's result; undefined if
  // there is none. REQUIRES: the lock, until it has been written.
  at::Tensor out_of(
      const Round& round,
      c10::IntArrayRef sizes,
      c10::ScalarType dtype) const;
  // It has been: `result` is the value that is in it. REQUIRES: the same lock.
  void set_written(const Round& round, const Blob& result) const;

 private:
  const std::shared_ptr<CallersRegistry> registry_;
};

} // namespace torchkv::dist

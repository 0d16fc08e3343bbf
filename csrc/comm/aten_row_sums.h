#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "../device/stream_order.h"
#include "backend.h"

namespace torchkv {

// Sums of row-sparse values, and of lists of these and dense ones, into dense
// tensors on accelerators, and steps of their rows, by PyTorch's operators. The
// ids are in CPU memory, so the host knows which rows there are, and each row
// is added up in the order of the values; copying the ids to the device blocks
// the host. The memory that it takes beside the values is that of the rows
// pushed, or of the result where a dense value is among the values.
class AtenRowSums {
 public:
  explicit AtenRowSums(StreamOrder& order) : order_(order) {}

  // REQUIRES: a contiguous result; one of ASSIGN, or row-sparse values only and
  // a rule that can step rows, or the norm of such.
  void add(const Job& job);
  void run();
  double squared_norm(double scale);

 private:
  struct Queued {
    Job job; // without its values
    c10::SmallVector<Value, 4> values;
  };
  void enter(const Queued& queued);

  StreamOrder& order_;
  std::vector<Queued> queued_;
};

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <vector>

#include "../device/stream_order.h"
#include "../kernels/cuda/params.h"
#include "../memory/row_pieces.h"
#include "backend.h"
#include "row_sources.h"

namespace torchkv {

// Sums of row-sparse values, and of lists of these and dense ones, into dense
// tensors on accelerators: rows by a kernel, or by PyTorch's operators on
// devices without it, dense values by these. A kernel steps the rows where they
// are; without it, copies of the rows are stepped as dense values are. The host
// waits for the number of rows, or for ids on their way to it or back.
//
// add() does all but the writes, so that running out of memory changes nothing.
// Beside the values this takes memory for the sums of the rows pushed or, where
// copies are stepped, for the rows with their state, or for the result where a
// dense value is among the values.
//
// Each row is added up in the order of the values, except without the kernel
// where a row of up to 32 elements repeats more than 32 times in one value: in
// an order of PyTorch's.
class DeviceRowSums {
 public:
  explicit DeviceRowSums(StreamOrder& order) : order_(order) {}

  // REQUIRES: a contiguous result, whose home has been entered; one of ASSIGN,
  // or row-sparse values only and a rule that can step rows, or the norm of
  // such.
  void add(const Job& job);
  void run();
  double squared_norm(double scale);

 private:
  // Rows of a piece of `whole` to overwrite.
  struct RowWrite {
    at::Tensor whole;
    RowPiece piece;
    at::Tensor ids; // among the piece's
    at::Tensor rows; // of the dtype of `whole`
  };
  struct KernelStep {
    RowSources sources;
    kernels::cuda::RowSteps call;
  };
  struct Queued {
    Place home;
    at::Tensor result;
    at::Tensor total; // of the result; undefined: only rows change
    bool clears = false; // the other rows become zero
    std::vector<RowWrite> rows;
    std::vector<KernelStep> steps;
  };
  struct Norm {
    Job job; // without its values
    at::Tensor sums;
    at::Tensor like_result; // of their shape
  };
  // By a kernel; false if there is none for such rows. REQUIRES: values whose
  // memory is not the result's: the kernel writes rows while it reads others.
  bool add_kernel_step(const Job& job, const RowPiece& piece, Queued& queued);
  // Of copies of the rows.
  void add_step(const Job& job, const RowPiece& piece, Queued& queued);

  StreamOrder& order_;
  std::vector<Queued> queued_;
  std::deque<Norm> norms_; // jobs point to them
};

} // namespace torchkv

#include "lines_door.h"

#include "kernels/cpu/lines.h"

void torchkv_sum_line(const torchkv::testing::LineCall& call) {
  using torchkv::kernels::cpu::SumLine;
  const SumLine line(
      {call.dtypes, call.num_values},
      call.stored_dtype,
      call.accumulation,
      call.rule,
      call.strides == nullptr ? SumLine::Layout::kDense
                              : SumLine::Layout::kAny);
  if (call.strides == nullptr) {
    line.dense(call.values, call.stored, call.num_elements, call.stream);
    torchkv::kernels::cpu::end_stream();
  } else {
    line.strided(
        call.values,
        call.strides,
        call.stored,
        call.stored_stride,
        call.num_elements);
  }
}

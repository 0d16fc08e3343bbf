#include "lines_c_api.h"

#include "kernels/cpu/cache_line.h"
#include "kernels/cpu/lamb.h"
#include "kernels/cpu/lines.h"

using torchkv::kernels::cpu::LambLine;
using torchkv::kernels::cpu::SumLine;
using torchkv::testing::LineCall;

void torchkv_sum_line(const LineCall& call) {
  if (call.what == LineCall::What::kLambNorms ||
      call.what == LineCall::What::kLambMove) {
    const LambLine line(call.step, call.stored_dtype, call.stored, call.state);
    if (call.what == LineCall::What::kLambMove) {
      line.move({call.norms[0], call.norms[1]}, call.num_elements);
      return;
    }
    const auto norms = line.squared_norms(call.num_elements, {1, 1});
    call.norms[0] = norms.weight;
    call.norms[1] = norms.step;
    return;
  }
  const SumLine line(
      {call.dtypes, call.num_values},
      call.stored_dtype,
      call.accumulation,
      call.step,
      call.strides == nullptr ? SumLine::Layout::kDense
                              : SumLine::Layout::kAny);
  if (call.what == LineCall::What::kSquaredNorm) {
    call.norms[0] = line.squared_norm(call.values, call.num_elements, 1);
  } else if (call.strides == nullptr) {
    line.dense(
        call.values, call.stored, call.state, call.num_elements, call.stream);
    torchkv::kernels::cpu::end_stream();
  } else {
    line.strided(
        call.values,
        call.strides,
        call.stored,
        call.stored_stride,
        call.state,
        call.num_elements);
  }
}

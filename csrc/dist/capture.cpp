#include "capture.h"

#include <c10/util/Exception.h>

namespace torchkv::dist {

void check_not_capturing(const Call& call, Runtime& runtime) {
  for (const Tensors* tensors : {call.values, call.outs}) {
    if (tensors == nullptr) {
      continue;
    }
    for (const auto& tensor : tensors->flat) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          !tensor.defined() || !tensor.is_cuda() ||
              !runtime.is_capturing(runtime.current_stream(tensor.device())),
          call.op,
          ": a call on a store of several processes cannot be captured into a "
          "CUDA graph, as a replay would send nothing; make it outside of the "
          "capture");
    }
  }
}

} // namespace torchkv::dist

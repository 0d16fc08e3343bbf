#include "async_scope.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace torchkv {

void AsyncScope::enter(c10::Device device) {
  const bool is_entered =
      std::any_of(parts_.begin(), parts_.end(), [&](const Work::Part& part) {
        return part.comm.device() == device;
      });
  if (device.is_cpu() || is_entered) {
    return;
  }
  Runtime& runtime = streams_.runtime;
  const c10::Stream caller = runtime.current_stream(device);
  const c10::Stream comm = streams_.of(Place{device});
  auto event = streams_.event(device);
  runtime.record(*event, caller);
  runtime.wait(*event, comm);
  const bool is_captured = runtime.is_capturing(comm);
  parts_.push_back({caller, comm, std::move(event), is_captured});
  runtime.exchange_stream(comm);
}

void AsyncScope::enter(c10::ArrayRef<at::Tensor> tensors) {
  for (const auto& tensor : tensors) {
    enter(tensor.device());
    if (!tensor.device().is_cpu()) {
      tensors_.push_back(tensor);
    }
  }
}

void AsyncScope::leave() {
  for (const auto& part : parts_) {
    streams_.runtime.exchange_stream(part.caller);
  }
  for (const auto& part : parts_) {
    streams_.runtime.record(*part.done, part.comm);
  }
}

WorkPtr AsyncScope::finish() {
  leave();
  return c10::make_intrusive<Work>(
      streams_.runtime, std::exchange(parts_, {}), std::exchange(tensors_, {}));
}

AsyncScope::~AsyncScope() {
  try {
    leave();
    for (const auto& part : parts_) {
      streams_.runtime.wait(*part.done, part.caller);
    }
  } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
    // As in StreamOrder.
  }
}

} // namespace torchkv

#include "host_copy.h"

#include <algorithm>
#include <utility>

namespace torchkv::dist {
namespace {

// Makes a stream the thread's current one.
class CurrentStream {
 public:
  CurrentStream(Runtime& runtime, c10::Stream stream)
      : runtime_(runtime), before_(runtime.exchange_stream(stream)) {}
  ~CurrentStream() {
    runtime_.exchange_stream(before_);
  }
  C10_DISABLE_COPY_AND_ASSIGN(CurrentStream);

 private:
  Runtime& runtime_;
  const c10::Stream before_;
};

} // namespace

HostCopy::HostCopy(
    std::shared_ptr<Streams> streams,
    Buffers buffers,
    std::vector<at::Tensor> tensors)
    : streams_(std::move(streams)),
      buffers_(std::move(buffers)),
      tensors_(std::move(tensors)) {
  Runtime& runtime = streams_->runtime;
  for (const auto& tensor : tensors_) {
    const c10::Device device = tensor.device();
    const bool is_known =
        std::any_of(devices_.begin(), devices_.end(), [&](auto& known) {
          return known.device == device;
        });
    if (!is_known) {
      auto event = streams_->event(device);
      runtime.record(*event, runtime.current_stream(device));
      devices_.push_back({device, std::move(event)});
    }
  }
}

std::vector<at::Tensor> HostCopy::wait() {
  Runtime& runtime = streams_->runtime;
  std::vector<at::Tensor> pinned(tensors_.size());
  for (auto& [device, event] : devices_) {
    const c10::Stream stream = streams_->of(torchkv::Place{device});
    const CurrentStream current(runtime, stream);
    runtime.wait(*event, stream);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].device() == device) {
        pinned[i] = runtime.copy_to_host(tensors_[i]);
        runtime.keep_until_done(tensors_[i], stream); // should this throw
      }
    }
    runtime.record(*event, stream);
  }
  for (const auto& [device, event] : devices_) {
    runtime.synchronize(*event);
  }
  tensors_.clear();
  if (!buffers_.are_shared()) {
    return pinned;
  }
  // Other ranks of this host read that memory.
  std::vector<at::Tensor> copies;
  copies.reserve(pinned.size());
  kernels::cpu::CopyBatch batch;
  for (const auto& from : pinned) {
    copies.push_back(buffers_.empty(from.sizes(), from.scalar_type()));
    if (from.nbytes() != 0) {
      batch.add(
          from.const_data_ptr(),
          from.nbytes(),
          copies.back().mutable_data_ptr());
    }
  }
  batch.run();
  return copies;
}

} // namespace torchkv::dist

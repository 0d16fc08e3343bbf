#include "host_copy.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "../kernels/cuda/library.h"

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

// Of memory that a device which has failed may still write to. LeakSanitizer
// does not report what a static variable refers to.
void never_free(std::vector<at::Tensor> copies) {
  static std::mutex mutex;
  static auto& held = *new std::vector<std::vector<at::Tensor>>;
  const std::lock_guard lock(mutex);
  held.push_back(std::move(copies));
}

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
  const kernels::cuda::BesideCaptures beside;
  std::vector<at::Tensor> copies(tensors_.size());
  auto fail =
      c10::make_scope_exit([&copies] { never_free(std::move(copies)); });
  for (auto& [device, event] : devices_) {
    const c10::Stream stream = streams_->of(torchkv::Place{device});
    const CurrentStream current(runtime, stream);
    runtime.wait(*event, stream);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const at::Tensor& from = tensors_[i];
      if (from.device() == device) {
        copies[i] = buffers_.are_shared()
            ? buffers_.empty_for(device, from.sizes(), from.scalar_type())
            : runtime.allocate_on_host(
                  from.sizes(), from.scalar_type(), device);
        runtime.keep_until_done(from, stream); // should this throw
        runtime.copy_pinned(copies[i], from);
      }
    }
    runtime.record(*event, stream);
  }
  for (const auto& [device, event] : devices_) {
    runtime.synchronize(*event);
  }
  fail.release();
  tensors_.clear();
  return copies;
}

} // namespace torchkv::dist

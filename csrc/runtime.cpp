#include "runtime.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "plain_dispatch.h"

namespace torchkv {
namespace {

struct C10Event final : RuntimeEvent {
  explicit C10Event(c10::DeviceType type) : event(type) {}
  c10::Event event;
};

class C10Runtime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  void record(std::unique_ptr<RuntimeEvent>& event, c10::Stream stream)
      override {
    if (event == nullptr) {
      event = std::make_unique<C10Event>(stream.device_type());
    }
    static_cast<C10Event&>(*event).event.record(stream);
  }

  void wait(RuntimeEvent& event, c10::Stream stream) override {
    static_cast<C10Event&>(event).event.block(stream);
  }

  void keep_until_done(const at::Tensor& tensor, c10::Stream stream) override {
    c10::impl::VirtualGuardImpl(stream.device_type())
        .recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }

  at::Tensor allocate(
      c10::IntArrayRef sizes,
      c10::IntArrayRef strides,
      c10::ScalarType dtype,
      c10::Device device) override {
    // A normal tensor: an inference tensor could not be written by an updater
    // outside inference mode.
    const c10::InferenceMode normal(false);
    const PlainDispatch plain;
    return at::empty_strided(
        sizes, strides, at::TensorOptions().dtype(dtype).device(device));
  }

  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    const PlainDispatch plain;
    destination.copy_(source);
  }
};

} // namespace

void forbid_resize(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
}

Runtime& default_runtime() {
  // Leaked: streams and events must not outlive a device runtime that static
  // destruction has torn down already.
  static auto* runtime = new C10Runtime();
  return *runtime;
}

void Timeline::enter(
    Runtime& runtime,
    c10::Device home,
    at::TensorList touched) {
  if (home.is_cpu()) {
    return;
  }
  const c10::Stream stream = runtime.current_stream(home);
  if (!last_ || *last_ == stream) {
    return;
  }
  runtime.wait(*event_, stream);
  for (const auto& tensor : touched) {
    if (tensor.defined()) {
      runtime.keep_until_done(tensor, stream);
    }
  }
}

void Timeline::leave(Runtime& runtime, c10::Device home) {
  if (home.is_cpu()) {
    return;
  }
  const c10::Stream stream = runtime.current_stream(home);
  runtime.record(event_, stream);
  last_ = stream;
}

} // namespace torchkv

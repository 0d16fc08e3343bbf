#include "runtime.h"

#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "../core/huge_pages.h"
#include "../core/plain_dispatch.h"
#include "../core/process.h"
#include "../kernels/cuda/library.h"

namespace torchkv {
namespace {

// c10 makes an event's device the current one, and then the previous one again
// with a CUDA call that creates a context there: 0.5 GB of a GPU that the
// process may not use. With a DeviceGuard around it, which creates none, the
// event's device is the current one already. Functions of the kernels' library
// need the same.
struct C10Event final : RuntimeEvent {
  explicit C10Event(c10::DeviceType type)
      : event(std::make_unique<c10::Event>(type)) {}
  ~C10Event() override {
    if (event->device_index() < 0) {
      return; // never recorded
    }
    try {
      const c10::DeviceGuard guard(event->device());
      event.reset();
    } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
      // The device has failed, or the process ends.
    }
  }
  C10_DISABLE_COPY_AND_ASSIGN(C10Event);

  std::unique_ptr<c10::Event> event;
};

void unpin(const kernels::cuda::Table& table, c10::Device device, void* data) {
  const kernels::cuda::BesideCaptures beside;
  try {
    const c10::DeviceGuard guard(device);
    table.unregister_host(device.index(), data);
  } catch (const c10::Error&) { // NOLINT(bugprone-empty-catch)
    // As above.
  }
}

class C10Runtime final : public Runtime {
 public:
  c10::Stream current_stream(c10::Device device) override {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  }

  c10::Stream new_stream(c10::Device device) override {
    return c10::impl::VirtualGuardImpl(device.type()).getNewStream(device);
  }

  c10::Stream exchange_stream(c10::Stream stream) override {
    return c10::impl::VirtualGuardImpl(stream.device_type())
        .exchangeStream(stream);
  }

  bool is_capturing(c10::Stream stream) override {
    // Other devices have no graphs that c10 knows of.
    return stream.device().is_cuda() && kernels::cuda::is_capturing(stream);
  }

  std::unique_ptr<RuntimeEvent> make_event(c10::Device device) override {
    return std::make_unique<C10Event>(device.type());
  }

  void record(RuntimeEvent& event, c10::Stream stream) override {
    const c10::DeviceGuard guard(stream.device());
    static_cast<C10Event&>(event).event->record(stream);
  }

  void wait(RuntimeEvent& event, c10::Stream stream) override {
    const c10::DeviceGuard guard(stream.device());
    static_cast<C10Event&>(event).event->block(stream);
  }

  bool is_done(RuntimeEvent& event) override {
    return static_cast<C10Event&>(event).event->query();
  }

  void synchronize(RuntimeEvent& event) override {
    static_cast<C10Event&>(event).event->synchronize();
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
    at::Tensor tensor = at::empty_strided(
        sizes, strides, at::TensorOptions().dtype(dtype).device(device));
    if (device.is_cpu()) {
      use_huge_pages(
          tensor.storage().mutable_data(), tensor.storage().nbytes());
    }
    return tensor;
  }

  void copy(const at::Tensor& destination, const at::Tensor& source) override {
    const PlainDispatch plain;
    if (destination.is_cuda() && source.is_cuda() &&
        destination.device() != source.device() && !may_copy_directly()) {
      // PyTorch's own copy would be direct. Like that one, the copy through the
      // host runs after the work on the destination's stream.
      const auto event = make_event(destination.device());
      record(*event, current_stream(destination.device()));
      wait(*event, current_stream(source.device()));
      copy(destination, source.cpu());
      return;
    }
    if (destination.scalar_type() == source.scalar_type()) {
      destination.copy_(source);
      return;
    }
    // Some of PyTorch's conversions (float to half, say) drop the negative bit,
    // so it is resolved first.
    const at::Tensor resolved = source.resolve_conj().resolve_neg();
    if (destination.is_neg() || destination.is_conj()) {
      destination.copy_(resolved.to(destination.scalar_type()));
    } else {
      destination.copy_(resolved);
    }
  }

  at::Tensor allocate_on_host(
      c10::IntArrayRef sizes,
      c10::ScalarType dtype,
      c10::Device device) override {
    const c10::InferenceMode normal(false);
    const PlainDispatch plain;
    const at::TensorOptions options(dtype);
    if (!device.is_cuda() || !at::hasCUDA()) {
      return at::empty(sizes, options);
    }
    // at::empty with pin_memory asks which accelerator is the current one,
    // which initializes it.
    const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) *
        c10::elementSize(dtype);
    auto memory = std::make_shared<c10::DataPtr>(
        at::getHostAllocator(c10::kCUDA)->allocate(bytes));
    void* const data = memory->get();
    return at::from_blob(
        data, sizes, [memory = std::move(memory)](void* /*data*/) {}, options);
  }

  std::shared_ptr<void> pin(void* data, size_t size, c10::Device device)
      override {
    const auto* const table =
        device.is_cuda() ? kernels::cuda::table() : nullptr;
    if (table == nullptr) {
      return nullptr;
    }
    const c10::DeviceGuard guard(device);
    if (table->register_host(device.index(), data, size) != 0) {
      return nullptr;
    }
    return {data, [=, forks = fork_count()](void* pinned) {
              if (forks == fork_count()) { // a child has no device
                unpin(*table, device, pinned);
              }
            }};
  }

  void copy_pinned(const at::Tensor& destination, const at::Tensor& source)
      override {
    const PlainDispatch plain;
    destination.copy_(source, /*non_blocking=*/true);
  }
};

enum class Access : uint8_t { kUnknown, kNone, kDirect };

// Indexed by both devices, whose indices are int8.
std::atomic<Access>& access_of(c10::Device device, c10::Device peer) {
  static std::array<std::array<std::atomic<Access>, 128>, 128> known{};
  return known.at(static_cast<unsigned char>(device.index()))
      .at(static_cast<unsigned char>(peer.index()));
}

bool enable(Runtime& runtime, c10::Device device, c10::Device peer) {
  if (!may_copy_directly()) {
    return false; // copies go through the host
  }
  {
    const c10::DeviceGuard guard(device);
    const auto* const table = kernels::cuda::table();
    if (table->enable_peer(device.index(), peer.index()) != 0) {
      return false;
    }
  }
  // PyTorch's allocator maps expandable segments for the peers that it knows
  // of: a copy by PyTorch gives the source's device access to the destination.
  const auto one_byte = [&](c10::Device on) {
    return runtime.allocate({1}, {1}, c10::kByte, on);
  };
  runtime.copy(one_byte(peer), one_byte(device));
  return true;
}

} // namespace

void forbid_resize(const at::Tensor& tensor) {
  tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
}

bool may_copy_directly() {
  const char* const text = std::getenv("TORCHKV_P2P");
  return text == nullptr || std::string_view(text) != "0";
}

bool may_use_peer(Runtime& runtime, c10::Device device, c10::Device peer) {
  if (device == peer) {
    return true;
  }
  auto& known = access_of(device, peer);
  if (known == Access::kUnknown) {
    static std::mutex mutex; // serializes queries
    const std::lock_guard lock(mutex);
    if (known == Access::kUnknown) {
      known = enable(runtime, device, peer) ? Access::kDirect : Access::kNone;
    }
  }
  return known == Access::kDirect;
}

void forget_peers() {
  for (int i = 0; i < 128; ++i) {
    for (int j = 0; j < 128; ++j) {
      access_of(
          {c10::kCUDA, static_cast<c10::DeviceIndex>(i)},
          {c10::kCUDA, static_cast<c10::DeviceIndex>(j)}) = Access::kUnknown;
    }
  }
}

Runtime& default_runtime() {
  // Leaked: streams and events must not outlive a device runtime that static
  // destruction has torn down already.
  static auto* runtime = new C10Runtime();
  return *runtime;
}

} // namespace torchkv

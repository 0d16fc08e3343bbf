#include "peer_access.h"

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <mutex>

#include "../kernels/cuda/library.h"

namespace torchkv {
namespace {

enum class Access : uint8_t { kUnknown, kNone, kDirect };

// Indexed by both devices, whose indices are int8.
std::atomic<Access>& access_of(c10::Device device, c10::Device peer) {
  static std::array<std::array<std::atomic<Access>, 128>, 128> known{};
  return known.at(static_cast<unsigned char>(device.index()))
      .at(static_cast<unsigned char>(peer.index()));
}

bool enable(Runtime& runtime, c10::Device device, c10::Device peer) {
  if (!may_copy_directly() ||
      kernels::cuda::table()->enable_peer(device.index(), peer.index()) != 0) {
    return false; // copies go through the host
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

} // namespace torchkv

#include "peer_access.h"

#include <ATen/core/Tensor.h>

#include "../kernels/cuda/library.h"

namespace torchkv {

bool PeerAccess::may_use(c10::Device device, c10::Device peer) {
  if (device == peer) {
    return true;
  }
  const std::lock_guard lock(mutex_);
  const auto [it, is_new] = known_.try_emplace({device.index(), peer.index()});
  if (is_new) {
    try {
      it->second = enable(device, peer);
    } catch (...) {
      known_.erase(it);
      throw;
    }
  }
  return it->second;
}

bool PeerAccess::enable(c10::Device device, c10::Device peer) {
  if (kernels::cuda::table()->enable_peer(device.index(), peer.index()) != 0) {
    return false; // copies through the host it is
  }
  // PyTorch's allocator keeps accounts of its own, by which it maps segments
  // that grow: its copies let the source's device at the destination.
  const auto one_byte = [&](c10::Device on) {
    return runtime_.allocate({1}, {1}, c10::kByte, on);
  };
  runtime_.copy(one_byte(peer), one_byte(device));
  return true;
}

} // namespace torchkv

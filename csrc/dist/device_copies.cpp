#include "device_copies.h"

#include <algorithm>

#include "buffers.h"
#include "byte_counts.h"

namespace torchkv::dist {

at::Tensor DeviceCopies::pinned(
    c10::ArrayRef<Blob> pieces,
    const Meta& meta,
    c10::Device device) {
  // Of many keys, no more is pinned at a time: PyTorch keeps it.
  constexpr size_t kMost = size_t{64} << 20U;
  check_size(pieces, meta.sizes, meta.dtype);
  if (num_bytes_ >= kMost) {
    wait();
  }
  at::Tensor result = runtime_.allocate_on_host(meta.sizes, meta.dtype, device);
  copy_pieces(pieces, result.mutable_data_ptr());
  num_bytes_ += result.nbytes();
  byte_counts().joined += static_cast<int64_t>(result.nbytes());
  return result;
}

void DeviceCopies::add(const at::Tensor& out, const at::Tensor& pinned) {
  runtime_.copy_pinned(out, pinned);
  const c10::Device device = out.device();
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
}

void DeviceCopies::wait() {
  for (const auto device : devices_) {
    const auto event = runtime_.make_event(device);
    runtime_.record(*event, runtime_.current_stream(device));
    runtime_.synchronize(*event);
  }
  devices_.clear();
  num_bytes_ = 0;
}

} // namespace torchkv::dist

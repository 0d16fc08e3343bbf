#include "device_copies.h"

#include <algorithm>

#include "../core/plain_dispatch.h"
#include "buffers.h"
#include "byte_counts.h"

namespace torchkv::dist {
namespace {

// Large enough to use the bus well, small enough that the first copy begins
// soon.
constexpr size_t kPart = size_t{16} << 20U;
// The host waits when so much is pinned, which PyTorch keeps.
constexpr size_t kMost = size_t{64} << 20U;

// The bytes [begin, begin + size) of what the pieces are together.
Blobs range_of(c10::ArrayRef<Blob> pieces, size_t begin, size_t size) {
  Blobs result;
  for (const auto& piece : pieces) {
    if (begin >= piece.size()) {
      begin -= piece.size();
      continue;
    }
    const size_t taken = std::min(piece.size() - begin, size);
    result.push_back(piece.slice(begin, taken));
    begin = 0;
    size -= taken;
    if (size == 0) {
      break;
    }
  }
  return result;
}

} // namespace

at::Tensor DeviceCopies::pinned(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype,
    c10::Device device) {
  if (num_bytes_ >= kMost) {
    wait();
  }
  at::Tensor result = runtime_.allocate_on_host(sizes, dtype, device);
  copy_pieces(pieces, result.mutable_data_ptr());
  num_bytes_ += result.nbytes();
  byte_counts().joined += static_cast<int64_t>(result.nbytes());
  return result;
}

void DeviceCopies::copy(const at::Tensor& out, const at::Tensor& from) {
  runtime_.copy_pinned(out, from);
  const c10::Device device = out.device();
  if (std::find(devices_.begin(), devices_.end(), device) == devices_.end()) {
    devices_.push_back(device);
  }
}

void DeviceCopies::add(
    c10::ArrayRef<Blob> pieces,
    const Meta& meta,
    c10::ArrayRef<at::Tensor> outs) {
  check_size(pieces, meta.sizes, meta.dtype);
  const bool has_parts =
      outs[0].nbytes() > kPart &&
      std::all_of(outs.begin(), outs.end(), [](const at::Tensor& out) {
        return out.is_contiguous() && !out.is_conj() && !out.is_neg();
      });
  if (!has_parts) {
    const at::Tensor from =
        pinned(pieces, meta.sizes, meta.dtype, outs[0].device());
    for (const auto& out : outs) {
      copy(out, from);
    }
    return;
  }
  const PlainDispatch plain;
  const size_t item = c10::elementSize(meta.dtype);
  const auto step = static_cast<int64_t>(kPart / item);
  for (int64_t begin = 0; begin < outs[0].numel(); begin += step) {
    const int64_t count = std::min(step, outs[0].numel() - begin);
    const at::Tensor from = pinned(
        range_of(
            pieces,
            static_cast<size_t>(begin) * item,
            static_cast<size_t>(count) * item),
        {count},
        meta.dtype,
        outs[0].device());
    for (const auto& out : outs) {
      copy(out.view(-1).narrow(0, begin, count), from);
    }
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

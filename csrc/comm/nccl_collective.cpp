#include "nccl_collective.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "../memory/layout.h"
#include "nccl.h"

namespace torchkv {
namespace {

using nccl::Group;

// Whether NCCL can use the tensor directly.
bool is_plain_cuda(const at::Tensor& tensor, const at::Tensor& stored) {
  return tensor.is_cuda() && is_plain(tensor) && same_layout(tensor, stored);
}

// The numbers of each value, if NCCL can sum them: one value on each of several
// devices including the home, all of one supported dtype.
std::optional<nccl::Numbers> reducible(
    c10::ArrayRef<Value> values,
    const Slice& slice) {
  if (values.size() < 2 || !slice.home.device.is_cuda() ||
      slice.value.numel() == 0) {
    return std::nullopt;
  }
  bool has_home = false;
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor* const value = values[i].dense();
    if (value == nullptr || !is_plain_cuda(*value, slice.value) ||
        value->scalar_type() != values[0].dtype()) {
      return std::nullopt;
    }
    for (size_t j = 0; j < i; ++j) {
      if (values[j].device() == value->device()) {
        return std::nullopt;
      }
    }
    has_home = has_home || value->device() == slice.home.device;
  }
  return has_home ? nccl::numbers_of(*values[0].data) : std::nullopt;
}

// For a value in equal shards, if each device has exactly one tensor: that of
// each part's device, in order; else nothing. The tensors are those of the
// first part and start at the beginning of the whole value.
template <class TensorOf>
c10::SmallVector<const at::Tensor*, 8> one_for_each(
    const Part* begin,
    const Part* end,
    size_t num_tensors,
    TensorOf tensor_of) {
  const auto num_parts = static_cast<size_t>(end - begin);
  if (num_parts < 2 || num_tensors != num_parts) {
    return {};
  }
  c10::SmallVector<const at::Tensor*, 8> result;
  for (const Part* part = begin; part != end; ++part) {
    const Slice& slice = *part->slice;
    const bool fits = slice.home.device.is_cuda() &&
        slice.end - slice.begin == begin->slice->end &&
        (result.empty() ||
         result.back()->device().index() < slice.home.device.index());
    const at::Tensor* found = nullptr;
    for (size_t i = 0; i < num_tensors; ++i) {
      const at::Tensor& tensor = tensor_of(i);
      found = tensor.device() == slice.home.device ? &tensor : found;
    }
    if (!fits || found == nullptr) {
      return {};
    }
    result.push_back(found);
  }
  return result;
}

} // namespace

NcclCollective::NcclCollective(Slices& slices, Streams& streams)
    : slices_(slices), streams_(streams) {
  TORCH_CHECK(
      nccl::functions() != nullptr,
      "create: the type 'nccl' requires NCCL, which PyTorch's CUDA builds load, "
      "but it is not loaded");
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  const bool blocks =
      blocking != nullptr && *blocking != 0 && std::string(blocking) != "0";
  const int num_devices = c10::impl::hasDeviceGuardImpl(c10::kCUDA)
      ? c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount()
      : 0;
  TORCH_CHECK(
      !blocks || num_devices < 2,
      "create: unexpected CUDA_LAUNCH_BLOCKING=",
      blocking,
      ", with which the type 'nccl' deadlocks on ",
      num_devices,
      " CUDA devices; unset it, or use the type 'device'");
}

void NcclCollective::reduce(Parts& parts) {
  StreamOrder order(streams_);
  Group group(streams_.runtime);
  // Makes a sum the only value of a part; returns its memory.
  const auto sum_for = [&](Part& part, c10::ScalarType dtype) {
    Slice& slice = *part.slice;
    slice.enter(order);
    at::Tensor sum = dtype == slice.value.scalar_type()
        ? slices_.merge_buffer(slice)
        : streams_.runtime.allocate_like(slice.value, dtype);
    return parts.set_value(part, std::move(sum)).mutable_data_ptr();
  };
  parts.for_each_item([&](Part* begin, Part* end) {
    const auto values = begin->values;
    const auto numbers = reducible(values, *begin->slice);
    const auto sent = one_for_each(
        begin, end, numbers ? values.size() : 0, [&](size_t i) -> auto& {
          return *values[i].data;
        });
    Group::Ranks scattered;
    for (size_t i = 0; i < sent.size(); ++i) {
      scattered.push_back(
          {sent[i]->device(),
           sent[i]->const_data_ptr(),
           sum_for(begin[i], sent[i]->scalar_type())});
    }
    if (!scattered.empty()) {
      group.add(
          Group::Kind::kReduceScatter,
          scattered,
          scattered[0].device,
          *numbers);
      return;
    }
    for (auto* next = begin; next != end; ++next) {
      Part& part = *next;
      const auto own = reducible(part.values, *part.slice);
      if (!own) {
        continue;
      }
      const auto own_values = part.values;
      const c10::Device home = part.slice->home.device;
      void* const sum = sum_for(part, own_values[0].dtype());
      Group::Ranks ranks;
      for (const auto& value : own_values) {
        const c10::Device device = value.device();
        ranks.push_back(
            {device,
             value.data->const_data_ptr(),
             device == home ? sum : nullptr});
      }
      group.add(Group::Kind::kReduce, ranks, home, *own);
    }
  });
  group.run();
}

void NcclCollective::broadcast(Parts& parts) {
  StreamOrder order(streams_);
  Group group(streams_.runtime);
  const auto bytes_of = [](const at::Tensor& tensor) {
    return nccl::Numbers{nccl::kUint8, static_cast<int64_t>(tensor.nbytes())};
  };
  const auto broadcast = [&](Part& part) {
    Slice& slice = *part.slice;
    const c10::Device home = slice.home.device;
    const bool leaves_home = home.is_cuda() && slice.value.numel() != 0 &&
        std::any_of(part.outs.begin(), part.outs.end(), [&](const auto& out) {
                               return out.is_cuda() && out.device() != home;
                             });
    if (!leaves_home) {
      return;
    }
    slice.enter(order);
    Group::Ranks ranks;
    const auto has_rank = [&](c10::Device device) {
      return std::any_of(
          ranks.begin(), ranks.end(), [&](const Group::Rank& rank) {
            return rank.device == device;
          });
    };
    c10::SmallVector<at::Tensor, 4> rest;
    for (const auto& out : part.outs) {
      if (out.scalar_type() == slice.value.scalar_type() &&
          is_plain_cuda(out, slice.value) && !has_rank(out.device())) {
        ranks.push_back(
            {out.device(),
             slice.value.const_data_ptr(),
             out.mutable_data_ptr()});
      } else {
        rest.push_back(out);
      }
    }
    if (!has_rank(home)) {
      void* const value = slice.value.mutable_data_ptr();
      ranks.push_back({home, value, value}); // in place
    }
    if (ranks.size() > 1) {
      group.add(Group::Kind::kBroadcast, ranks, home, bytes_of(slice.value));
      parts.set_outs(part, std::move(rest));
    }
  };
  parts.for_each_item([&](Part* begin, Part* end) {
    const auto outs = begin->outs;
    const auto filled = one_for_each(
        begin, end, outs.size(), [&](size_t i) -> auto& { return outs[i]; });
    Group::Ranks ranks;
    for (size_t i = 0; i < filled.size(); ++i) {
      Slice& slice = *begin[i].slice;
      slice.enter(order);
      ranks.push_back(
          {slice.home.device,
           slice.value.const_data_ptr(),
           filled[i]->mutable_data_ptr()});
      begin[i].outs = {};
    }
    if (!ranks.empty()) {
      group.add(
          Group::Kind::kAllGather,
          ranks,
          ranks[0].device,
          bytes_of(begin->slice->value));
      return;
    }
    std::for_each(begin, end, broadcast);
  });
  group.run();
}

} // namespace torchkv

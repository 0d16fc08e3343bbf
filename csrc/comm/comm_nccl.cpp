#include "comm_nccl.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include "../core/errors.h"
#include "../kernels/cpu/sum.h"
#include "../memory/layout.h"
#include "../memory/outs.h"
#include "nccl_library.h"

namespace torchkv {
namespace {

struct Numbers {
  nccl::DataType dtype;
  int64_t count;
};

// How NCCL sees a tensor's numbers, if it can add them.
std::optional<Numbers> numbers_of(const at::Tensor& tensor) {
  const int64_t count = tensor.numel();
  switch (tensor.scalar_type()) {
    case c10::kFloat:
      return Numbers{nccl::kFloat32, count};
    case c10::kDouble:
      return Numbers{nccl::kFloat64, count};
    case c10::kHalf:
      return Numbers{nccl::kFloat16, count};
    case c10::kBFloat16:
      return Numbers{nccl::kBfloat16, count};
    case c10::kComplexFloat:
      return Numbers{nccl::kFloat32, 2 * count};
    case c10::kComplexDouble:
      return Numbers{nccl::kFloat64, 2 * count};
    case c10::kComplexHalf:
      return Numbers{nccl::kFloat16, 2 * count};
    case c10::kChar:
      return Numbers{nccl::kInt8, count};
    case c10::kByte:
      return Numbers{nccl::kUint8, count};
    case c10::kInt:
      return Numbers{nccl::kInt32, count};
    case c10::kUInt32:
      return Numbers{nccl::kUint32, count};
    case c10::kLong:
      return Numbers{nccl::kInt64, count};
    case c10::kUInt64:
      return Numbers{nccl::kUint64, count};
    default:
      return std::nullopt;
  }
}

// Whether NCCL can carry the tensor as it lies.
bool is_plain_cuda(const at::Tensor& tensor, const at::Tensor& stored) {
  return tensor.is_cuda() && is_plain(tensor) &&
      kernels::cpu::lie_alike(tensor, stored);
}

// The operations of one call, enqueued together by run(). Each device takes
// part with its current stream.
class Group {
 public:
  explicit Group(Runtime& runtime) : runtime_(runtime) {}

  enum class Kind : uint8_t { kReduce, kBroadcast, kReduceScatter, kAllGather };

  // What a device has in an operation.
  struct Rank {
    c10::Device device;
    const void* send;
    void* receive;
  };
  using Ranks = c10::SmallVector<Rank, 8>;

  // Of a scatter or gather, `numbers` are those of one rank, and `root` counts
  // for nothing. RuntimeError while a stream of one is captured into a CUDA
  // graph: the graph would have to take part on all devices or on none, and
  // what NCCL refuses leaves its communicators unusable. REQUIRES: one rank for
  // each device, one of them `root`.
  void add(Kind kind, Ranks ranks, c10::Device root, Numbers numbers) {
    std::sort(ranks.begin(), ranks.end(), [](const Rank& a, const Rank& b) {
      return a.device.index() < b.device.index();
    });
    std::vector<int> devices;
    int root_rank = 0;
    for (const auto& rank : ranks) {
      TORCH_CHECK(
          !runtime_.is_capturing(runtime_.current_stream(rank.device)),
          "expected no CUDA graph to be captured with the type 'nccl' between "
          "several devices, but the current stream of ",
          rank.device,
          " is; a store of type 'device' can be captured");
      if (rank.device == root) {
        root_rank = static_cast<int>(devices.size());
      }
      devices.push_back(rank.device.index());
    }
    const auto comms = nccl::clique(devices);
    for (size_t i = 0; i < ranks.size(); ++i) {
      operations_.push_back({kind, ranks[i], root_rank, numbers, comms[i]});
    }
    if (std::find(cliques_.begin(), cliques_.end(), devices) ==
        cliques_.end()) {
      cliques_.push_back(std::move(devices));
    }
  }

  void run() {
    if (operations_.empty()) {
      return;
    }
    const nccl::Functions& functions = *nccl::functions();
    const std::lock_guard lock(nccl::group_mutex());
    check("ncclGroupStart", functions.group_start());
    nccl::Result first = 0;
    for (const auto& operation : operations_) {
      const nccl::Result result = enqueue(functions, operation);
      first = first == 0 ? result : first;
    }
    const nccl::Result end = functions.group_end();
    check("an operation", first);
    check("ncclGroupEnd", end);
    operations_.clear();
  }

 private:
  struct Operation {
    Kind kind;
    Rank rank;
    int root;
    Numbers numbers;
    nccl::Comm comm;
  };

  void check(const char* what, nccl::Result result) {
    if (result == 0) {
      return;
    }
    const std::string problem = nccl::describe(what, result);
    for (const auto& devices : cliques_) {
      nccl::give_up(devices, problem);
    }
    TORCH_CHECK(false, problem);
  }

  nccl::Result enqueue(
      const nccl::Functions& functions,
      const Operation& operation) {
    const auto& [device, send, receive] = operation.rank;
    const auto& [dtype, number] = operation.numbers;
    const auto count = static_cast<size_t>(number);
    const int root = operation.root;
    const nccl::Comm comm = operation.comm;
    void* const stream = runtime_.current_stream(device).native_handle();
    switch (operation.kind) {
      case Kind::kReduce:
        return functions.reduce(
            send, receive, count, dtype, nccl::kSum, root, comm, stream);
      case Kind::kBroadcast:
        return functions.broadcast(
            send, receive, count, dtype, root, comm, stream);
      case Kind::kReduceScatter:
        return functions.reduce_scatter(
            send, receive, count, dtype, nccl::kSum, comm, stream);
      case Kind::kAllGather:
        return functions.all_gather(send, receive, count, dtype, comm, stream);
    }
    TORCHKV_INTERNAL_ASSERT(false);
  }

  Runtime& runtime_;
  std::vector<Operation> operations_;
  std::vector<std::vector<int>> cliques_; // of the operations: their devices
};

// The numbers of each value, where they are for NCCL: one value on each of
// several devices, the home among them, of one dtype that it adds.
std::optional<Numbers> reducible(
    c10::ArrayRef<Value> values,
    const Slice& slice) {
  if (values.size() < 2 || !slice.home.device.is_cuda() ||
      slice.value.numel() == 0) {
    return std::nullopt;
  }
  bool has_home = false;
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor& value = *values[i].data;
    if (!is_plain_cuda(value, slice.value) ||
        value.scalar_type() != values[0].data->scalar_type()) {
      return std::nullopt;
    }
    for (size_t j = 0; j < i; ++j) {
      if (values[j].data->device() == value.device()) {
        return std::nullopt;
      }
    }
    has_home = has_home || value.device() == slice.home.device;
  }
  return has_home ? numbers_of(*values[0].data) : std::nullopt;
}

// Of each part, in order, where a value is cut into pieces of one size: the one
// tensor on its device, and all tensors are such; else nothing. The tensors are
// those of the first part, and begin where the whole value begins.
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

// NCCL takes a device once: no places that share one.
CommNccl::CommNccl(Runtime& runtime)
    : runtime_(runtime), local_(Slices::Policy::kCutEach, runtime) {
  TORCH_CHECK(
      nccl::functions() != nullptr,
      "create: expected NCCL for the type 'nccl', which PyTorch's CUDA builds "
      "load, but none is loaded");
  const char* const blocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  const bool blocks =
      blocking != nullptr && *blocking != 0 && std::string(blocking) != "0";
  const int num_devices = c10::impl::hasDeviceGuardImpl(c10::kCUDA)
      ? c10::impl::VirtualGuardImpl(c10::kCUDA).deviceCount()
      : 0;
  TORCH_CHECK(
      !blocks || num_devices < 2,
      "create: expected launches that do not block for the type 'nccl' with ",
      num_devices,
      " CUDA devices, but got CUDA_LAUNCH_BLOCKING=",
      blocking,
      ", with which the first operation would wait for the others for ever; "
      "unset it, or use the type 'device'");
}

// Sums that are at home, to which parts point.
struct CommNccl::Brought {
  std::deque<at::Tensor> sums;
  std::deque<Value> values;
};

// Sums the values of parts at the homes of their slices, where NCCL can.
CommNccl::Brought CommNccl::bring_home(Parts& parts) {
  Brought brought;
  StreamOrder order = local_.make_order();
  Group group(runtime_);
  // Makes a sum the value of a part; returns its memory.
  const auto sum_for = [&](Part& part, c10::ScalarType dtype) {
    Slice& slice = *part.slice;
    order.enter(slice);
    brought.sums.push_back(
        dtype == slice.value.scalar_type() ? local_.slices().merge_buffer(slice)
                                           : runtime_.allocate(
                                                 slice.value.sizes(),
                                                 slice.value.strides(),
                                                 dtype,
                                                 slice.home.device));
    brought.values.push_back({Value::Form::kDense, &brought.sums.back()});
    part.values = brought.values.back();
    return brought.sums.back().mutable_data_ptr();
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
      void* const sum = sum_for(part, own_values[0].data->scalar_type());
      Group::Ranks ranks;
      for (const auto& value : own_values) {
        const c10::Device device = value.data->device();
        ranks.push_back(
            {device,
             value.data->const_data_ptr(),
             device == home ? sum : nullptr});
      }
      group.add(Group::Kind::kReduce, ranks, home, *own);
    }
  });
  group.run();
  return brought;
}

void CommNccl::reduce_update(c10::ArrayRef<Item> items) {
  local_.gather_for(items);
  Parts parts(runtime_, items);
  const Brought brought = bring_home(parts);
  local_.reduce_update(parts);
}

void CommNccl::accumulate(c10::ArrayRef<Item> items) {
  Parts parts(runtime_, items);
  const Brought brought = bring_home(parts);
  local_.accumulate(parts);
}

double CommNccl::squared_norm(c10::ArrayRef<Item> items, double scale) {
  Parts parts(runtime_, items);
  const Brought brought = bring_home(parts);
  return local_.squared_norm(parts, scale);
}

void CommNccl::reduce(const Item& item, Update update) {
  local_.slices().gather(*item.entry);
  Parts parts(runtime_, item);
  const Brought brought = bring_home(parts);
  Item at_home = item;
  at_home.values = parts.begin()->values;
  local_.reduce(at_home, update);
}

void CommNccl::copy_out(c10::ArrayRef<Item> items) {
  if (may_overlap(items)) {
    local_.copy_out(items);
    return;
  }
  Parts parts(runtime_, items);
  const auto others = send_out(parts);
  local_.copy_out(parts);
  bump_versions(items);
}

// Fills the outs that NCCL can fill; the parts are left with the others, which
// it returns.
std::deque<std::vector<at::Tensor>> CommNccl::send_out(Parts& parts) {
  std::deque<std::vector<at::Tensor>> others;
  StreamOrder order = local_.make_order();
  Group group(runtime_);
  const auto bytes_of = [](const at::Tensor& tensor) {
    return Numbers{nccl::kUint8, static_cast<int64_t>(tensor.nbytes())};
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
    order.enter(slice);
    Group::Ranks ranks;
    const auto has_rank = [&](c10::Device device) {
      return std::any_of(
          ranks.begin(), ranks.end(), [&](const Group::Rank& rank) {
            return rank.device == device;
          });
    };
    auto& rest = others.emplace_back();
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
      part.outs = rest;
    }
  };
  parts.for_each_item([&](Part* begin, Part* end) {
    const auto outs = begin->outs;
    const auto filled = one_for_each(
        begin, end, outs.size(), [&](size_t i) -> auto& { return outs[i]; });
    Group::Ranks ranks;
    for (size_t i = 0; i < filled.size(); ++i) {
      Slice& slice = *begin[i].slice;
      order.enter(slice);
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
  return others;
}

} // namespace torchkv

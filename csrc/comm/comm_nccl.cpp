#include "comm_nccl.h"

#include <c10/util/Exception.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "../kernels/cpu/sum.h"
#include "nccl_library.h"
#include "outs.h"

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
bool is_plain(const at::Tensor& tensor, const at::Tensor& stored) {
  return tensor.is_cuda() && !tensor.is_conj() && !tensor.is_neg() &&
      !tensor._is_zerotensor() && kernels::cpu::lie_alike(tensor, stored);
}

// The operations of one call, enqueued together by run(). Each device takes
// part with its current stream.
class Group {
 public:
  explicit Group(Runtime& runtime) : runtime_(runtime) {}

  // What a device has in an operation.
  struct Part {
    c10::Device device;
    const void* send;
    void* receive;
  };

  // REQUIRES: one part for each device, one of them `root`.
  void add(
      bool is_reduce,
      c10::SmallVector<Part, 8> parts,
      c10::Device root,
      Numbers numbers) {
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) {
      return a.device.index() < b.device.index();
    });
    std::vector<int> devices;
    int root_rank = 0;
    for (const auto& part : parts) {
      if (part.device == root) {
        root_rank = static_cast<int>(devices.size());
      }
      devices.push_back(part.device.index());
    }
    const auto comms = nccl::clique(devices);
    for (size_t rank = 0; rank < parts.size(); ++rank) {
      operations_.push_back(
          {is_reduce, parts[rank], root_rank, numbers, comms[rank]});
    }
  }

  void run() {
    if (operations_.empty()) {
      return;
    }
    const nccl::Functions& functions = *nccl::functions();
    const std::lock_guard lock(nccl::group_mutex());
    nccl::check("ncclGroupStart", functions.group_start());
    nccl::Result first = 0;
    for (const auto& operation : operations_) {
      const nccl::Result result = enqueue(functions, operation);
      first = first == 0 ? result : first;
    }
    const nccl::Result end = functions.group_end();
    nccl::check("an operation", first);
    nccl::check("ncclGroupEnd", end);
    operations_.clear();
  }

 private:
  struct Operation {
    bool is_reduce;
    Part part;
    int root;
    Numbers numbers;
    nccl::Comm comm;
  };

  nccl::Result enqueue(
      const nccl::Functions& functions,
      const Operation& operation) {
    const Part& part = operation.part;
    const auto count = static_cast<size_t>(operation.numbers.count);
    void* const stream = runtime_.current_stream(part.device).native_handle();
    return operation.is_reduce ? functions.reduce(
                                     part.send,
                                     part.receive,
                                     count,
                                     operation.numbers.dtype,
                                     nccl::kSum,
                                     operation.root,
                                     operation.comm,
                                     stream)
                               : functions.broadcast(
                                     part.send,
                                     part.receive,
                                     count,
                                     operation.numbers.dtype,
                                     operation.root,
                                     operation.comm,
                                     stream);
  }

  Runtime& runtime_;
  std::vector<Operation> operations_;
};

// The numbers of each value, where they are for NCCL: one value on each of
// several devices, the home among them, of one dtype that it adds.
std::optional<Numbers> reducible(
    c10::ArrayRef<Value> values,
    const Slice& slice) {
  if (values.size() < 2 || !slice.home.is_cuda() || slice.value.numel() == 0) {
    return std::nullopt;
  }
  bool has_home = false;
  for (size_t i = 0; i < values.size(); ++i) {
    const at::Tensor& value = *values[i].data;
    if (!is_plain(value, slice.value) ||
        value.scalar_type() != values[0].data->scalar_type()) {
      return std::nullopt;
    }
    for (size_t j = 0; j < i; ++j) {
      if (values[j].data->device() == value.device()) {
        return std::nullopt;
      }
    }
    has_home = has_home || value.device() == slice.home;
  }
  return has_home ? numbers_of(*values[0].data) : std::nullopt;
}

} // namespace

CommNccl::CommNccl(Runtime& runtime)
    : runtime_(runtime), local_(CommAten::Home::kDevice, runtime) {
  TORCH_CHECK(
      nccl::functions() != nullptr,
      "create: expected NCCL for the type 'nccl', which PyTorch's CUDA builds "
      "load, but none is loaded");
}

// Items whose values are at home, and what they point to.
struct CommNccl::Brought {
  std::vector<Item> items;
  std::vector<at::Tensor> sums;
  std::vector<Value> values;
};

CommNccl::Brought CommNccl::bring_home(c10::ArrayRef<Item> items) {
  Brought brought;
  brought.items.assign(items.begin(), items.end());
  brought.sums.reserve(items.size()); // values point to them
  brought.values.reserve(items.size()); // and items to values
  StreamOrder order(runtime_, events_);
  Group group(runtime_);
  for (auto& item : brought.items) {
    Slice& slice = item.entry->slices[0];
    const auto numbers = reducible(item.values, slice);
    if (!numbers) {
      continue;
    }
    order.enter(slice);
    const at::Tensor& first = *item.values[0].data;
    brought.sums.push_back(
        first.scalar_type() == slice.value.scalar_type()
            ? local_.merge_buffer(slice)
            : runtime_.allocate(
                  slice.value.sizes(),
                  slice.value.strides(),
                  first.scalar_type(),
                  slice.home));
    const at::Tensor& sum = brought.sums.back();
    c10::SmallVector<Group::Part, 8> parts;
    for (const auto& value : item.values) {
      const c10::Device device = value.data->device();
      parts.push_back(
          {device,
           value.data->const_data_ptr(),
           device == slice.home ? sum.mutable_data_ptr() : nullptr});
    }
    group.add(
        /*is_reduce=*/true, std::move(parts), slice.home, *numbers);
    brought.values.push_back({Value::Form::kDense, &sum});
    item.values = brought.values.back();
  }
  group.run();
  return brought;
}

void CommNccl::reduce_update(c10::ArrayRef<Item> items) {
  local_.reduce_update(bring_home(items).items);
}

void CommNccl::accumulate(c10::ArrayRef<Item> items) {
  local_.accumulate(bring_home(items).items);
}

double CommNccl::squared_norm(c10::ArrayRef<Item> items) {
  return local_.squared_norm(bring_home(items).items);
}

void CommNccl::reduce(const Item& item, Update update) {
  local_.reduce(bring_home(item).items[0], update);
}

void CommNccl::copy_out(c10::ArrayRef<Item> items) {
  if (may_overlap(items)) {
    local_.copy_out(items);
    return;
  }
  std::vector<Item> rest(items.begin(), items.end());
  std::vector<std::vector<at::Tensor>> rest_outs(items.size());
  {
    StreamOrder order(runtime_, events_);
    Group group(runtime_);
    for (size_t i = 0; i < items.size(); ++i) {
      Slice& slice = items[i].entry->slices[0];
      const bool leaves_home =
          slice.home.is_cuda() && slice.value.numel() != 0 &&
          std::any_of(
              items[i].outs.begin(), items[i].outs.end(), [&](const auto& out) {
                return out.is_cuda() && out.device() != slice.home;
              });
      if (!leaves_home) {
        continue;
      }
      order.enter(slice);
      c10::SmallVector<Group::Part, 8> parts;
      const auto has_part = [&](c10::Device device) {
        return std::any_of(
            parts.begin(), parts.end(), [&](const Group::Part& part) {
              return part.device == device;
            });
      };
      for (const auto& out : items[i].outs) {
        if (out.scalar_type() == slice.value.scalar_type() &&
            is_plain(out, slice.value) && !has_part(out.device())) {
          parts.push_back(
              {out.device(),
               slice.value.const_data_ptr(),
               out.mutable_data_ptr()});
          bump_version(out);
        } else {
          rest_outs[i].push_back(out);
        }
      }
      rest[i].outs = rest_outs[i];
      if (!has_part(slice.home)) {
        void* const value = slice.value.mutable_data_ptr();
        parts.push_back({slice.home, value, value}); // in place
      }
      if (parts.size() > 1) {
        const auto bytes = static_cast<int64_t>(slice.value.nbytes());
        group.add(
            /*is_reduce=*/false,
            std::move(parts),
            slice.home,
            {nccl::kUint8, bytes});
      }
    }
    group.run();
  }
  local_.copy_out(rest);
}

} // namespace torchkv

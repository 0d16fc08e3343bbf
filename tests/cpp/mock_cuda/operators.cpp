// ATen on the fake devices: memory, copies, and every other operator by the
// CPU's kernel, which sees the same memory as a CPU tensor.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"
#include "devices.h"
#include "graph.h"
#include "host_memory.h"
#include "memory.h"

namespace torchkv::mock_cuda {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

// Guard for running CPU kernels: below autograd and without checks.
struct OnTheCpu {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::DisableRecordFunctionGuard unseen;
};

// A CPU tensor of the same memory.
at::Tensor cpu_view(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) {
    return tensor;
  }
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), c10::kCPU),
      /*allocator=*/nullptr,
      /*resizable=*/false);
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage),
      c10::DispatchKeySet(c10::DispatchKey::CPU),
      tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor empty(
    c10::IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> device,
    std::optional<bool> /*pin_memory*/,
    std::optional<c10::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      sizes, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes,
    c10::IntArrayRef strides,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> /*layout*/,
    std::optional<c10::Device> device,
    std::optional<bool> /*pin_memory*/) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

// A result of the CPU, as a view of the memory of `base`.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& on_cpu) {
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW,
      c10::Storage(base.storage()),
      base.key_set(),
      on_cpu.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      on_cpu.sizes(), on_cpu.strides(), on_cpu.storage_offset());
  view._set_conj(on_cpu.is_conj());
  view._set_neg(on_cpu.is_neg());
  return view;
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns()) {
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

// The argument that a result is, by the schema: (a!) and (a!), or (a) and (a).
const c10::IValue& aliased(
    const c10::FunctionSchema& schema,
    const c10::Argument& result,
    c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr &&
        alias->beforeSets() == result.alias_info()->beforeSets()) {
      return arguments[i];
    }
  }
  TORCH_CHECK(false, "mock_cuda: no argument for a result of ", schema);
}

// Each CUDA tensor's view for the CPU: one for each tensor, so that an operator
// sees where two of its arguments are the same.
class CpuViews {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    auto& view = views_[tensor.unsafeGetTensorImpl()];
    if (!view.defined()) {
      // An out without elements may be resized.
      view = tensor.is_cuda() && tensor.numel() == 0
          ? at::empty(tensor.sizes(), tensor.scalar_type())
          : cpu_view(tensor);
    }
    return view;
  }

 private:
  std::unordered_map<const c10::TensorImpl*, at::Tensor> views_;
};

// Resizes the memory of an operator's out for the CPU's result.
void resize_to(const at::Tensor& out, const at::Tensor& on_cpu) {
  auto* storage = out.storage().unsafeGetStorageImpl();
  TORCH_CHECK(storage->resizable(), "mock_cuda: an out cannot be resized");
  storage->set_data_ptr_noswap(allocator().allocate(on_cpu.nbytes()));
  storage->set_nbytes(on_cpu.nbytes());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(
      on_cpu.sizes(), on_cpu.strides());
  const OnTheCpu guards;
  cpu_view(out).copy_(on_cpu);
}

// Runs in each replay. Operators that only fill new tensors also run now, to
// know their shapes.
void record(
    const c10::OperatorHandle& op,
    c10::ArrayRef<c10::IValue> arguments,
    const torch::jit::Stack& on_cpu,
    CpuViews& views,
    c10::Stream stream,
    torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  std::vector<at::Tensor> read;
  std::vector<at::Tensor> written;
  std::vector<at::Tensor> empty;
  for_each_tensor(
      schema, arguments, [&](const at::Tensor& tensor, bool writes) {
        if (writes && tensor.numel() == 0) {
          empty.push_back(tensor);
        } else if (tensor.is_cuda()) {
          (writes ? written : read).push_back(views.of(tensor));
        }
      });
  const bool makes_any = std::any_of(
      schema.returns().begin(),
      schema.returns().end(),
      [](const c10::Argument& result) {
        return result.alias_info() == nullptr;
      });
  TORCH_CHECK(
      written.empty() || (empty.empty() && !makes_any),
      "mock_cuda: ",
      schema.name(),
      " in a capture is not modelled");

  torch::jit::Stack results = on_cpu;
  std::vector<at::Tensor> outs; // resized, on the CPU
  std::vector<at::Tensor> made; // these, then what is returned
  if (written.empty()) {
    {
      const OnTheCpu guards;
      op.callBoxed(&results);
    }
    for (const auto& tensor : empty) {
      const at::Tensor out = views.of(tensor);
      if (out.numel() != 0) {
        resize_to(tensor, out);
        outs.push_back(out);
        made.push_back(cpu_view(tensor));
      }
    }
  }
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    if (schema.returns()[i].alias_info() != nullptr) {
      stack->push_back(aliased(schema, schema.returns()[i], arguments));
      continue;
    }
    if (!results[i].isTensor() && !results[i].isTensorList()) {
      synchronize(stream);
    }
    stack->push_back(with_tensors(results[i], [&](const at::Tensor& tensor) {
      at::Tensor result = empty_strided(
          tensor.sizes(),
          tensor.strides(),
          tensor.scalar_type(),
          {},
          stream.device(),
          {});
      made.push_back(cpu_view(result));
      return result;
    }));
  }

  carry_out(stream, [=, name = schema.name()](c10::Stream on) {
    const WorkPtr work = enqueue(on, name);
    const auto touch = [&](const auto& tensors, bool is_write) {
      for (const auto& tensor : tensors) {
        access(work, on, tensor, is_write);
      }
    };
    touch(read, /*is_write=*/false);
    touch(written, /*is_write=*/true);
    touch(made, /*is_write=*/true);
    const OnTheCpu guards;
    torch::jit::Stack again = on_cpu;
    op.callBoxed(&again);
    auto next = made.begin();
    for (const auto& out : outs) {
      (next++)->copy_(out);
    }
    for (const auto& result : again) {
      with_tensors(result, [&](const at::Tensor& tensor) {
        return next == made.end() ? tensor : (next++)->copy_(tensor);
      });
    }
  });
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto arguments = torch::jit::pop(*stack, schema.arguments().size());
  std::optional<c10::Device> device = device_of(arguments);
  for (const auto& argument : arguments) {
    if (!device && argument.isDevice()) {
      device = argument.toDevice();
    }
  }
  TORCH_CHECK(device, "mock_cuda: ", schema.name(), " has no device");
  const c10::DeviceGuard guard(*device); // as PyTorch's own kernels have
  const c10::Stream stream = current_stream(*device);

  // Held to the end, so that work runs in the order in which it is enqueued.
  const std::lock_guard lock(mutex());
  const bool is_work = !is_view(schema);
  if (is_work) {
    ++counters().operators;
    for_each_tensor(schema, arguments, [&](const at::Tensor& tensor, bool) {
      TORCH_CHECK(
          tensor.is_cuda() || tensor.dim() == 0,
          "mock_cuda: ",
          schema.name(),
          " on ",
          place_of(stream),
          " got a tensor of the CPU");
    });
  }
  CpuViews views;
  torch::jit::Stack on_cpu;
  for (const auto& argument : arguments) {
    on_cpu.push_back(
        argument.isDevice()
            ? c10::IValue(c10::Device(c10::kCPU))
            : with_tensors(argument, [&](const at::Tensor& tensor) {
                return views.of(tensor);
              }));
  }
  if (is_work && capture_of(stream) != nullptr) {
    record(op, arguments, on_cpu, views, stream, stack);
    return;
  }

  WorkPtr work;
  if (is_work) {
    work = enqueue(stream, schema.name());
    for_each_tensor(
        schema, arguments, [&](const at::Tensor& tensor, bool writes) {
          if (tensor.is_cuda()) {
            access(work, stream, tensor, writes);
          }
        });
  }
  {
    const OnTheCpu guards;
    op.callBoxed(&on_cpu);
  }
  for_each_tensor(
      schema, arguments, [&](const at::Tensor& tensor, bool writes) {
        if (writes && views.of(tensor).sizes() != tensor.sizes()) {
          resize_to(tensor, views.of(tensor));
          access(work, stream, tensor, /*is_write=*/true);
        }
      });

  const bool returns_numbers =
      std::any_of(on_cpu.begin(), on_cpu.end(), [](const c10::IValue& result) {
        return !result.isTensor() && !result.isTensorList();
      });
  if (returns_numbers || op.hasTag(at::Tag::dynamic_output_shape)) {
    synchronize(stream); // the host needs them, or sizes
  }

  for (size_t i = 0; i < on_cpu.size(); ++i) {
    const auto& result = schema.returns()[i];
    if (result.alias_info() != nullptr) {
      const auto& argument = aliased(schema, result, arguments);
      stack->push_back(
          is_written(result)
              ? argument
              : with_tensors(on_cpu[i], [&](const at::Tensor& tensor) {
                  return view_of(argument.toTensor(), tensor);
                }));
      continue;
    }
    stack->push_back(with_tensors(on_cpu[i], [&](const at::Tensor& tensor) {
      at::Tensor made = empty_strided(
          tensor.sizes(),
          tensor.strides(),
          tensor.scalar_type(),
          {},
          *device,
          {});
      access(work, stream, made, /*is_write=*/true);
      const OnTheCpu guards;
      cpu_view(made).copy_(tensor);
      return made;
    }));
  }
}

// One copy by a stream of one device.
void enqueue_copy(
    c10::Stream stream,
    const at::Tensor& to,
    const at::Tensor& from,
    bool non_blocking) {
  const std::lock_guard lock(mutex());
  ++counters().operators;
  const auto copy = [to_is_cuda = to.is_cuda(),
                     from_is_cuda = from.is_cuda(),
                     to = cpu_view(to),
                     from = cpu_view(from)](c10::Stream on) {
    const WorkPtr work = enqueue(on, "aten::copy_");
    const auto touch =
        [&](const at::Tensor& tensor, bool is_cuda, bool is_write) {
          if (is_cuda) {
            access(work, on, tensor, is_write, Reach::kAll);
          } else {
            access_host(work, on, tensor, is_write);
          }
        };
    touch(from, from_is_cuda, /*is_write=*/false);
    touch(to, to_is_cuda, /*is_write=*/true);
    const OnTheCpu guards;
    to.copy_(from);
  };
  if (to.is_cuda() && from.is_cuda()) {
    carry_out(stream, copy);
    return;
  }
  copy(stream); // memory of the CPU is not modelled in a capture
  if (!non_blocking) {
    synchronize(stream);
  }
}

void wait(c10::Stream waiting, c10::Stream other) {
  c10::Event event(c10::kCUDA);
  event.record(other);
  event.block(waiting);
}

// As PyTorch's copy_kernel_cuda: the same devices, temporaries and stream
// order.
at::Tensor& copy_(
    at::Tensor& to,
    const at::Tensor& from_any_shape,
    bool non_blocking) {
  if (to.is_same(from_any_shape)) {
    return to;
  }
  const at::Tensor from = from_any_shape.expand_as(to);
  if (to.numel() == 0) {
    return to;
  }
  if (to.device() == from.device()) {
    const c10::DeviceGuard guard(to.device());
    enqueue_copy(current_stream(to.device()), to, from, non_blocking);
    return to;
  }
  const bool both = to.is_cuda() && from.is_cuda();
  const bool has_peer =
      both && enable_peer_access(from.device().index(), to.device().index());
  const bool is_plain = to.scalar_type() == from.scalar_type() &&
      to.is_contiguous() && from.is_contiguous() &&
      to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
  if (!is_plain && !has_peer) {
    // Converted on the source device on the way to the CPU, unless that blocks.
    const bool converts_first = to.is_cuda() || non_blocking;
    const auto dtype = converts_first ? to.scalar_type() : from.scalar_type();
    at::Tensor plain = at::empty(to.sizes(), to.options().dtype(dtype));
    plain.copy_(
        from.to(dtype).resolve_conj().resolve_neg().contiguous(), non_blocking);
    to.copy_(plain, non_blocking);
    return to;
  }
  const c10::Device device = from.is_cuda() ? from.device() : to.device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = current_stream(device);
  if (!both) {
    enqueue_copy(stream, to, from, non_blocking);
    return to;
  }
  const c10::Stream other = current_stream(to.device());
  wait(stream, other);
  enqueue_copy(stream, to, from, non_blocking);
  wait(other, stream);
  return to;
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  keep_until_done(tensor.storage().data(), stream);
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("record_stream", &record_stream);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

} // namespace
} // namespace torchkv::mock_cuda

#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <vector>

#include "../../core/plain_dispatch.h"
#include "../../core/process.h"
#include "parallel.h"
#include "sum.h"

namespace torchkv::kernels::cpu {
namespace {

// Transposed values are copied in blocks of this many bytes in all; page faults
// in larger ones cost more than the copies. They divide the outermost dimension
// of a value, to read consecutive memory. If that is the innermost one of the
// stored value, blocks are larger and lines have at least this size.
constexpr int64_t kBlockBytes = int64_t{1024} * 1024;
constexpr int64_t kLargeBlockBytes = 16 * int64_t{1024} * 1024;
constexpr int64_t kMinLine = 16;
// A smaller copy costs more than it saves.
constexpr int64_t kMinBytes = int64_t{8} * 1024;

// The dimension of more than one element with the smallest (largest) stride; -1
// if all have one.
int64_t dimension_of(const at::Tensor& tensor, bool largest) {
  int64_t result = -1;
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1 &&
        (result < 0 || (tensor.stride(i) < tensor.stride(result)) != largest)) {
      result = i;
    }
  }
  return result;
}

// Whether consecutive elements of `stored` are further apart in `value` than
// along another dimension: a channels_last gradient of a contiguous weight, for
// example. Its cache lines would be read one element at a time.
bool is_transposed(const at::Tensor& value, const at::Tensor& stored) {
  if (stored.numel() * value.element_size() < kMinBytes) {
    return false;
  }
  const int64_t innermost = dimension_of(stored, /*largest=*/false);
  for (int64_t i = 0; i < stored.dim(); ++i) {
    if (stored.size(i) != 1 && value.stride(i) != 0 &&
        value.stride(i) < value.stride(innermost)) {
      return true;
    }
  }
  return false;
}

// Line by line, as PyTorch's iterator finds them: the stored value is its first
// operand.
void sum_lines(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleStep& step,
    const State& state) {
  const size_t num_values = values.size();
  c10::SmallVector<c10::ScalarType, 8> dtypes;
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .resize_outputs(false)
      .add_output(stored);
  for (const auto& value : values) {
    config.add_const_input(*value.data);
    dtypes.push_back(value.data->scalar_type());
  }
  auto iterator = config.build();
  const auto dtype = stored.scalar_type();
  const SumLine line(dtypes, dtype, accumulation, step, SumLine::Layout::kAny);
  const bool has_state = step.rule.id != RuleSpec::Id::kAssign;
  const StateLine first_state = state.line();
  const auto state_size = has_state
      ? static_cast<int64_t>(c10::elementSize(at::toOpMathType(dtype)))
      : 0;
  const auto* first = static_cast<const char*>(stored.const_data_ptr());
  const auto sum = [&](char** data,
                       const int64_t* strides,
                       int64_t num_elements,
                       int64_t num_lines) {
    const int64_t* const line_strides = strides + num_values + 1;
    c10::SmallVector<char*, 8> next(data, data + num_values + 1);
    for (int64_t i = 0; i < num_lines; ++i) {
      const int64_t element = (next[0] - first) / stored.element_size();
      line.strided(
          next.data() + 1,
          strides + 1,
          next[0],
          strides[0],
          first_state.at(element * state_size), // has the strides of `stored`
          num_elements);
      for (size_t k = 0; k <= num_values; ++k) {
        next[k] += line_strides[k];
      }
    }
  };
  if (may_use_threads()) {
    iterator.for_each(sum);
  } else {
    iterator.serial_for_each(sum, {0, iterator.numel()});
  }
}

// A copy with the strides of `model`.
at::Tensor copied(const at::Tensor& value, const at::Tensor& model) {
  at::Tensor copy =
      at::empty_like(model, value.options(), at::MemoryFormat::Preserve);
  if (copy.dim() == 2 && !copy.is_contiguous()) {
    copy.t().copy_(value.t()); // fast where the destination is contiguous
  } else {
    copy.copy_(value);
  }
  return copy;
}

} // namespace

void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    const RuleStep& step,
    const State& state) {
  if (stored.numel() == 0) {
    return;
  }
  const PlainDispatch plain; // for the operators and the iterator's views
  c10::SmallVector<bool, 8> transposed;
  const at::Tensor* first = nullptr; // transposed value
  int64_t num_bytes = 0;
  for (const auto& value : values) {
    // In a forked child PyTorch's copy waits for the threads of the parent.
    transposed.push_back(
        fork_count() == 0 && is_transposed(*value.data, stored));
    if (transposed.back()) {
      first = first == nullptr ? value.data : first;
      num_bytes += stored.numel() * value.data->element_size();
    }
  }
  if (first == nullptr) {
    sum_lines(values, stored, accumulation, step, state);
    return;
  }
  const int64_t dim = dimension_of(*first, /*largest=*/true);
  const bool is_innermost = dim == dimension_of(stored, /*largest=*/false);
  const int64_t size = stored.size(dim);
  const int64_t block = is_innermost
      ? std::max(kMinLine, kLargeBlockBytes * size / num_bytes)
      : std::max(int64_t{1}, kBlockBytes * size / num_bytes);
  for (int64_t begin = 0; begin < size; begin += block) {
    const auto part_of = [&](const at::Tensor& tensor) {
      return size <= block || !tensor.defined()
          ? tensor
          : tensor.narrow(dim, begin, std::min(block, size - begin));
    };
    const at::Tensor result = part_of(stored);
    std::vector<at::Tensor> tensors;
    std::vector<Value> sources;
    tensors.reserve(values.size()); // sources point into it
    for (size_t k = 0; k < values.size(); ++k) {
      const at::Tensor value = part_of(*values[k].data);
      tensors.push_back(transposed[k] ? copied(value, result) : value);
      sources.emplace_back(&tensors.back());
    }
    State part_of_state{part_of(state.master), state.states};
    for (auto& tensor : part_of_state.states) {
      tensor = part_of(tensor);
    }
    sum_lines(sources, result, accumulation, step, part_of_state);
  }
}

} // namespace torchkv::kernels::cpu

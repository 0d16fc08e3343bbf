#include <ATen/ExpandUtils.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "../../core/plain_dispatch.h"
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
  iterator.for_each(sum);
}

// How the transposed values of a sum are copied: in blocks along a dimension.
struct Blocks {
  c10::SmallVector<bool, 8> transposed; // of the values
  int64_t dim = -1; // -1: no value is transposed
  int64_t size = 0; // of a block, along `dim`
  int64_t num_bytes = 0; // of the copies of a block
};

constexpr int64_t kAlignment = 64;

int64_t copy_bytes(int64_t num_elements, const at::Tensor& value) {
  return (num_elements * value.element_size() + kAlignment - 1) / kAlignment *
      kAlignment;
}

Blocks blocks_of(c10::ArrayRef<Value> values, const at::Tensor& stored) {
  Blocks blocks;
  const at::Tensor* first = nullptr; // transposed value
  int64_t num_bytes = 0;
  for (const auto& value : values) {
    blocks.transposed.push_back(is_transposed(*value.data, stored));
    if (blocks.transposed.back()) {
      first = first == nullptr ? value.data : first;
      num_bytes += stored.numel() * value.data->element_size();
    }
  }
  if (first == nullptr) {
    return blocks;
  }
  blocks.dim = dimension_of(*first, /*largest=*/true);
  const int64_t size = stored.size(blocks.dim);
  const bool is_innermost =
      blocks.dim == dimension_of(stored, /*largest=*/false);
  blocks.size = is_innermost
      ? std::max(kMinLine, kLargeBlockBytes * size / num_bytes)
      : std::max(int64_t{1}, kBlockBytes * size / num_bytes);
  blocks.size = std::min(blocks.size, size);
  for (size_t k = 0; k < values.size(); ++k) {
    if (blocks.transposed[k]) {
      blocks.num_bytes +=
          copy_bytes(stored.numel() / size * blocks.size, *values[k].data);
    }
  }
  return blocks;
}

// A copy at `memory`, with the order of dimensions of `model`.
at::Tensor copied(
    const at::Tensor& value,
    const at::Tensor& model,
    void* memory) {
  const at::Tensor copy = at::from_blob(
      memory,
      model.sizes(),
      at::infer_dense_strides(model.sizes(), model.strides()),
      value.options());
  if (copy.dim() == 2 && !copy.is_contiguous()) {
    copy.t().copy_(value.t()); // fast where the destination is contiguous
  } else {
    copy.copy_(value);
  }
  return copy;
}

} // namespace

int64_t scratch_bytes(c10::ArrayRef<Value> values, const at::Tensor& stored) {
  return stored.numel() == 0 ? 0 : blocks_of(values, stored).num_bytes;
}

void sum_strided(
    c10::ArrayRef<Value> values,
    const at::Tensor& stored,
    c10::ScalarType accumulation,
    void* scratch,
    const RuleStep& step,
    const State& state) {
  if (stored.numel() == 0) {
    return;
  }
  const PlainDispatch plain; // for the operators and the iterator's views
  const Blocks blocks = blocks_of(values, stored);
  if (blocks.dim < 0) {
    sum_lines(values, stored, accumulation, step, state);
    return;
  }
  const int64_t size = stored.size(blocks.dim);
  for (int64_t begin = 0; begin < size; begin += blocks.size) {
    const auto part_of = [&](const at::Tensor& tensor) {
      return size <= blocks.size || !tensor.defined()
          ? tensor
          : tensor.narrow(
                blocks.dim, begin, std::min(blocks.size, size - begin));
    };
    const at::Tensor result = part_of(stored);
    auto* memory = static_cast<char*>(scratch);
    std::vector<at::Tensor> tensors;
    std::vector<Value> sources;
    tensors.reserve(values.size()); // sources point into it
    for (size_t k = 0; k < values.size(); ++k) {
      at::Tensor value = part_of(*values[k].data);
      if (blocks.transposed[k]) {
        value = copied(value, result, memory);
        memory += copy_bytes(result.numel(), value);
      }
      tensors.push_back(std::move(value));
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

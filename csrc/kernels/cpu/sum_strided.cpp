#include <ATen/ExpandUtils.h>
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
// operand. The state begins with that of the element at `first`.
void sum_lines(const Sum& part, const char* first) {
  const size_t num_values = part.values.size();
  c10::SmallVector<c10::ScalarType, 8> dtypes;
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .resize_outputs(false)
      .add_output(part.stored);
  for (const auto& value : part.values) {
    config.add_const_input(*value.data);
    dtypes.push_back(value.data->scalar_type());
  }
  auto iterator = config.build();
  const SumLine line(
      dtypes,
      part.stored.scalar_type(),
      part.accumulation,
      part.step,
      SumLine::Layout::kAny);
  const int64_t state_size = part.bytes_of_state();
  iterator.for_each([&](char** data,
                        const int64_t* strides,
                        int64_t num_elements,
                        int64_t num_lines) {
    const int64_t* const line_strides = strides + num_values + 1;
    c10::SmallVector<char*, 8> next(data, data + num_values + 1);
    for (int64_t i = 0; i < num_lines; ++i) {
      const int64_t element = (next[0] - first) / part.stored.element_size();
      line.strided(
          next.data() + 1,
          strides + 1,
          next[0],
          strides[0],
          part.state.at(element, state_size), // has the strides of `stored`
          num_elements);
      for (size_t k = 0; k <= num_values; ++k) {
        next[k] += line_strides[k];
      }
    }
  });
}

constexpr int64_t kAlignment = 64;

int64_t copy_bytes(int64_t num_elements, const at::Tensor& value) {
  return (num_elements * value.element_size() + kAlignment - 1) / kAlignment *
      kAlignment;
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

void StridedSums::add(const Sum& sum) {
  const at::Tensor& stored = sum.stored;
  if (stored.numel() == 0) {
    return;
  }
  Job& job =
      jobs_.emplace_back(Job{sum, {sum.values.begin(), sum.values.end()}, {}});
  int64_t num_bytes = 0;
  for (const auto& value : job.values) {
    job.is_transposed.push_back(is_transposed(*value.data, stored));
    if (job.is_transposed.back()) {
      num_bytes += stored.numel() * value.data->element_size();
      job.dim =
          job.dim < 0 ? dimension_of(*value.data, /*largest=*/true) : job.dim;
    }
  }
  if (job.dim < 0) {
    return;
  }
  const int64_t size = stored.size(job.dim);
  const bool is_innermost = job.dim == dimension_of(stored, /*largest=*/false);
  job.block = is_innermost
      ? std::max(kMinLine, kLargeBlockBytes * size / num_bytes)
      : std::max(int64_t{1}, kBlockBytes * size / num_bytes);
  job.block = std::min(job.block, size);
  int64_t needed = 0;
  for (size_t k = 0; k < job.values.size(); ++k) {
    if (job.is_transposed[k]) {
      needed +=
          copy_bytes(stored.numel() / size * job.block, *job.values[k].data);
    }
  }
  scratch_bytes_ = std::max(scratch_bytes_, needed);
}

void StridedSums::run(const at::Tensor& scratch) const {
  for (const auto& job : jobs_) {
    run(job,
        scratch.defined() ? static_cast<char*>(scratch.mutable_data_ptr())
                          : nullptr);
  }
}

void StridedSums::run(const Job& job, char* scratch) {
  const PlainDispatch plain; // for the operators and the iterator's views
  const auto& [_, stored, accumulation, step, state, no_outs] = job.sum;
  const auto* const first = static_cast<const char*>(stored.const_data_ptr());
  if (job.dim < 0) {
    sum_lines({job.values, stored, accumulation, step, state, no_outs}, first);
    return;
  }
  const int64_t size = stored.size(job.dim);
  for (int64_t begin = 0; begin < size; begin += job.block) {
    const auto part_of = [&](const at::Tensor& tensor) {
      return size == job.block
          ? tensor
          : tensor.narrow(job.dim, begin, std::min(job.block, size - begin));
    };
    const at::Tensor result = part_of(stored);
    char* memory = scratch;
    std::vector<at::Tensor> tensors;
    std::vector<Value> sources;
    tensors.reserve(job.values.size()); // sources point into it
    for (size_t k = 0; k < job.values.size(); ++k) {
      at::Tensor value = part_of(*job.values[k].data);
      if (job.is_transposed[k]) {
        value = copied(value, result, memory);
        memory += copy_bytes(result.numel(), value);
      }
      tensors.push_back(std::move(value));
      sources.emplace_back(&tensors.back());
    }
    sum_lines({sources, result, accumulation, step, state}, first);
  }
}

} // namespace torchkv::kernels::cpu

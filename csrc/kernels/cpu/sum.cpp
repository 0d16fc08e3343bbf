#include "sum.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <ATen/TensorIterator.h>
#include <c10/core/DynamicCast.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../../plain_dispatch.h"

namespace torchkv::kernels::cpu {
namespace {

// Sums are kept in a block of this many elements: 4 KiB in fp32, so that they
// stay in the first-level cache while the replicas stream past.
constexpr int64_t kBlock = 1024;

template <typename acc_t>
acc_t add(acc_t a, acc_t b) {
  if constexpr (std::is_same_v<acc_t, bool>) {
    return a || b; // as torch.add
  } else {
    return static_cast<acc_t>(a + b);
  }
}

// Contiguous inputs and result of one dtype:
//
//   inputs[0]  [ block ][ block ][ ..
//   inputs[1]  [ block ][ block ][ ..    --> total[kBlock] --> result
//
template <typename scalar_t>
void sum_contiguous(
    c10::ArrayRef<const char*> inputs,
    char* result,
    int64_t num_elements) {
  using acc_t = at::opmath_type<scalar_t>;
  auto* out = reinterpret_cast<scalar_t*>(result);
  alignas(64) acc_t total[kBlock];
  for (int64_t begin = 0; begin < num_elements; begin += kBlock) {
    const int64_t size = std::min(kBlock, num_elements - begin);
    const auto* first = reinterpret_cast<const scalar_t*>(inputs[0]) + begin;
    for (int64_t i = 0; i < size; ++i) {
      total[i] = static_cast<acc_t>(first[i]);
    }
    for (const char* input : inputs.slice(1)) {
      const auto* next = reinterpret_cast<const scalar_t*>(input) + begin;
      for (int64_t i = 0; i < size; ++i) {
        total[i] = add<acc_t>(total[i], static_cast<acc_t>(next[i]));
      }
    }
    for (int64_t i = 0; i < size; ++i) {
      out[begin + i] = static_cast<scalar_t>(total[i]);
    }
  }
}

void sum_contiguous(
    c10::ScalarType dtype,
    c10::ArrayRef<const char*> inputs,
    char* result,
    int64_t num_elements) {
  AT_DISPATCH_V2(
      dtype,
      "torchkv sum",
      AT_WRAP([&] { sum_contiguous<scalar_t>(inputs, result, num_elements); }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_FLOAT8_TYPES),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool,
      at::kHalf,
      at::kBFloat16,
      at::kComplexHalf);
}

// Any strides and dtypes, one line of elements. data[0] is the result.
template <typename acc_t>
void sum_strided(
    char* const* data,
    const int64_t* strides,
    c10::ArrayRef<c10::ScalarType> dtypes,
    int64_t num_elements) {
  for (int64_t i = 0; i < num_elements; ++i) {
    acc_t total =
        c10::fetch_and_cast<acc_t>(dtypes[1], data[1] + i * strides[1]);
    for (size_t k = 2; k < dtypes.size(); ++k) {
      total = add<acc_t>(
          total,
          c10::fetch_and_cast<acc_t>(dtypes[k], data[k] + i * strides[k]));
    }
    c10::cast_and_store<acc_t>(dtypes[0], data[0] + i * strides[0], total);
  }
}

void sum_strided(
    c10::ScalarType accumulation,
    char* const* data,
    const int64_t* strides,
    c10::ArrayRef<c10::ScalarType> dtypes,
    int64_t num_elements) {
  AT_DISPATCH_V2(
      accumulation,
      "torchkv sum",
      AT_WRAP(
          [&] { sum_strided<scalar_t>(data, strides, dtypes, num_elements); }),
      AT_EXPAND(AT_ALL_TYPES_AND_COMPLEX),
      AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES),
      at::kBool);
}

// Walks any tensors in lines that PyTorch's iterator finds and shares out.
void sum_lines(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    c10::ScalarType accumulation) {
  const PlainDispatch plain; // for the views that the iterator makes
  at::TensorIteratorConfig config;
  config.set_check_mem_overlap(false)
      .check_all_same_dtype(false)
      .resize_outputs(false)
      .add_output(result);
  c10::SmallVector<c10::ScalarType, 8> dtypes{result.scalar_type()};
  for (const auto& value : values) {
    config.add_const_input(*value.data);
    dtypes.push_back(value.data->scalar_type());
  }
  auto iterator = config.build();
  const bool same_dtype =
      std::all_of(dtypes.begin(), dtypes.end(), [&](auto dtype) {
        return dtype == dtypes[0];
      });
  const auto element_size = static_cast<int64_t>(result.element_size());
  const auto num_operands = dtypes.size();

  iterator.for_each([&](char** data, const int64_t* strides, int64_t size) {
    const bool contiguous = same_dtype &&
        std::all_of(strides, strides + num_operands, [&](int64_t stride) {
                              return stride == element_size;
                            });
    if (contiguous) {
      sum_contiguous(
          dtypes[0],
          c10::ArrayRef<const char*>(data + 1, num_operands - 1),
          data[0],
          size);
    } else {
      sum_strided(accumulation, data, strides, dtypes, size);
    }
  });
}

} // namespace

void sum(
    c10::ArrayRef<Value> values,
    const at::Tensor& result,
    c10::ScalarType accumulation,
    bool same_layout) {
  const int64_t num_elements = result.numel();
  if (!same_layout || num_elements > at::internal::GRAIN_SIZE) {
    sum_lines(values, result, accumulation);
    return;
  }
  // Small: the iterator would cost more than the sum.
  c10::SmallVector<const char*, 8> inputs;
  for (const auto& value : values) {
    inputs.push_back(static_cast<const char*>(value.data->const_data_ptr()));
  }
  sum_contiguous(
      result.scalar_type(),
      inputs,
      static_cast<char*>(result.mutable_data_ptr()),
      num_elements);
}

void copy(const at::Tensor& value, const at::Tensor& result) {
  if (result.numel() == 0) {
    return; // its memory may be null
  }
  const auto* source = static_cast<const char*>(value.const_data_ptr());
  auto* destination = static_cast<char*>(result.mutable_data_ptr());
  const size_t num_bytes = result.nbytes();
  if (result.numel() <= at::internal::GRAIN_SIZE) {
    // memmove: the out of a pull may be anything, also the value itself.
    std::memmove(destination, source, num_bytes);
    return;
  }
  const PlainDispatch plain;
  result.copy_(value); // PyTorch shares a large copy out over its threads
}

} // namespace torchkv::kernels::cpu

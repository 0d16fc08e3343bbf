#include "group_adagrad.h"

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>

#include "apply_rule.h"
#include "cache_line.h"
#include "clones.h"
#include "squares.h"

namespace torchkv::kernels::cpu {
namespace {

template <typename T>
TORCHKV_CLONES double squares_of(const T* gradients, int64_t count) {
  return sum_of_squares(gradients, count);
}

template <typename T>
TORCHKV_CLONES void add_to_row(T* history, T mean, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    history[i] += mean;
  }
}

// Of whole rows.
template <typename T>
TORCHKV_CLONES void add_to_rows(
    T* __restrict history,
    const T* __restrict gradients,
    int64_t num_rows,
    int64_t row_size) {
  if (row_size == 1) {
    for (int64_t i = 0; i < num_rows; ++i) {
      history[i] += gradients[i] * gradients[i];
    }
    return;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const double squares = sum_of_squares(gradients + row * row_size, row_size);
    const T mean = static_cast<T>(squares / static_cast<double>(row_size));
    for (int64_t i = row * row_size; i < (row + 1) * row_size; ++i) {
      history[i] += mean;
    }
  }
}

} // namespace

GroupHistories::GroupHistories(
    const RuleStep& step,
    c10::ScalarType dtype,
    int64_t row_size)
    : step_(step), dtype_(dtype), row_size_(row_size) {}

void GroupHistories::add(
    const SumLine& sum,
    c10::ArrayRef<const char*> values,
    int64_t value_size,
    char* history,
    int64_t num_elements) const {
  if (c10::toRealValueType(dtype_) == c10::kDouble) {
    add(sum,
        values,
        value_size,
        reinterpret_cast<double*>(history),
        num_elements);
  } else {
    add(sum,
        values,
        value_size,
        reinterpret_cast<float*>(history),
        num_elements);
  }
}

// In blocks of several rows, or of a part of one.
template <typename T>
void GroupHistories::add(
    const SumLine& sum,
    c10::ArrayRef<const char*> values,
    int64_t value_size,
    T* history,
    int64_t num_elements) const {
  constexpr int64_t kNumbers = 2048;
  alignas(kCacheLine) std::array<T, kNumbers> gradients;
  const int64_t per_element = c10::isComplexType(dtype_) ? 2 : 1;
  const int64_t row = row_size_ * per_element; // numbers
  c10::SmallVector<const char*, 8> from(values.begin(), values.end());
  const auto read = [&](int64_t num_numbers) {
    const int64_t size = num_numbers / per_element;
    auto* const to = reinterpret_cast<char*>(gradients.data());
    sum.dense(from.data(), to, {}, size, /*stream=*/false);
    for (auto& value : from) {
      value += size * value_size;
    }
    make_limited_gradient(step_, gradients.data(), num_numbers);
  };
  T* const end = history + num_elements * per_element;
  if (row <= kNumbers) {
    const int64_t most = kNumbers / row * row;
    for (int64_t size = 0; history != end; history += size) {
      size = std::min<int64_t>(most, end - history);
      read(size);
      add_to_rows(history, gradients.data(), size / row, row);
    }
    return;
  }
  for (; history != end; history += row) {
    double squares = 0;
    for (int64_t first = 0, size = 0; first < row; first += size) {
      size = std::min(kNumbers, row - first);
      read(size);
      squares += squares_of(gradients.data(), size);
    }
    const double mean = squares / static_cast<double>(row);
    add_to_row(history, static_cast<T>(mean), row);
  }
}

} // namespace torchkv::kernels::cpu

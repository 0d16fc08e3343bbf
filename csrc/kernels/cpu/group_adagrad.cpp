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

// `read(to, count)` gives the gradient's next numbers.
template <typename T, class Read>
void add_mean_squares(T* history, T* end, int64_t row_size, Read read) {
  constexpr int64_t kNumbers = 2048;
  alignas(kCacheLine) std::array<T, kNumbers> gradients;
  if (row_size <= kNumbers) {
    const int64_t most = kNumbers / row_size * row_size;
    for (int64_t size = 0; history != end; history += size) {
      size = std::min<int64_t>(most, end - history);
      read(gradients.data(), size);
      add_to_rows(history, gradients.data(), size / row_size, row_size);
    }
    return;
  }
  for (; history != end; history += row_size) {
    double squares = 0;
    for (int64_t first = 0, size = 0; first < row_size; first += size) {
      size = std::min(kNumbers, row_size - first);
      read(gradients.data(), size);
      squares += squares_of(gradients.data(), size);
    }
    const double mean = squares / static_cast<double>(row_size);
    add_to_row(history, static_cast<T>(mean), row_size);
  }
}

} // namespace

void GroupHistories::add(
    const SumLine& sum,
    c10::ArrayRef<const char*> values,
    int64_t value_size,
    char* history,
    int64_t num_elements) const {
  const int64_t per_element = c10::isComplexType(dtype_) ? 2 : 1; // numbers
  c10::SmallVector<const char*, 8> from(values.begin(), values.end());
  const auto add_as = [&](auto zero) {
    using T = decltype(zero);
    auto* const first = reinterpret_cast<T*>(history);
    add_mean_squares(
        first,
        first + num_elements * per_element,
        row_size_ * per_element,
        [&](T* to, int64_t num_numbers) {
          const int64_t size = num_numbers / per_element;
          sum.dense(
              from.data(),
              reinterpret_cast<char*>(to),
              {},
              size,
              /*stream=*/false);
          for (auto& value : from) {
            value += size * value_size;
          }
          make_limited_gradient(step_, to, num_numbers);
        });
  };
  c10::toRealValueType(dtype_) == c10::kDouble ? add_as(double())
                                               : add_as(float());
}

} // namespace torchkv::kernels::cpu

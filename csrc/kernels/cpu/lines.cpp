#include "lines.h"

#include <ATen/OpMathType.h>
#include <c10/util/TypeCast.h>
#include <c10/util/complex.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "../../core/errors.h"
#include "apply_rule.h"
#include "cache_line.h"

namespace torchkv::kernels::cpu {
namespace {

// Sums that need a conversion or a rule are computed in blocks of this many
// elements: 1 KiB in fp32, in the first-level cache. With longer blocks the
// hardware prefetchers follow the accesses less well.
constexpr int64_t kBlock = 256;

// The count of numbers before the first aligned one.
int64_t head_of(const char* address, int64_t num_numbers, int64_t number_size) {
  return std::min(num_numbers, bytes_to_alignment(address) / number_size);
}

void stream_copy(const char* source, char* destination, int64_t num_bytes) {
  const int64_t head = std::min(bytes_to_alignment(destination), num_bytes);
  std::memmove(destination, source, head);
  int64_t i = head;
  for (; i + kCacheLine <= num_bytes; i += kCacheLine) {
    TORCHKV_STREAM_LINE(destination + i, source + i);
  }
  std::memmove(destination + i, source + i, num_bytes - i);
}

// Calls `f` with a number of the type in which sums of this accumulation type
// are computed.
template <typename F>
void with_type(c10::ScalarType accumulation, F f) {
  switch (accumulation) {
    case c10::kBool: // NOLINT(bugprone-branch-clone): other types
      return f(bool());
    case c10::kFloat:
      return f(float());
    case c10::kDouble:
      return f(double());
    case c10::kComplexFloat:
      return f(c10::complex<float>());
    case c10::kComplexDouble:
      return f(c10::complex<double>());
    default:
      // The low bits of a sum of integers do not depend on its width.
      return f(int64_t());
  }
}

} // namespace

void copy_line(
    const char* source,
    c10::ArrayRef<char*> outs,
    int64_t num_bytes,
    bool stream) {
  // In blocks that fit into L1, so that the source is read from memory once.
  constexpr int64_t kPiece = 2048;
  const int64_t step = outs.size() == 1 ? num_bytes : kPiece;
  for (int64_t i = 0; i < num_bytes; i += step) {
    const int64_t size = std::min(step, num_bytes - i);
    for (char* out : outs) {
      if (stream) {
        stream_copy(source + i, out + i, size);
      } else {
        std::memmove(out + i, source + i, size);
      }
    }
  }
}

SumLine::SumLine(
    c10::ArrayRef<c10::ScalarType> values,
    c10::ScalarType stored,
    c10::ScalarType accumulation,
    const RuleStep& step,
    Layout layout)
    : step_(step),
      stored_(stored),
      is_assign_(step.rule.id == RuleSpec::Id::kAssign),
      stored_size_(static_cast<int64_t>(c10::elementSize(stored))) {
  bool is_uniform = true;
  for (const auto dtype : values) {
    sizes_.push_back(static_cast<int64_t>(c10::elementSize(dtype)));
    is_uniform = is_uniform && dtype == stored;
  }
  if (!is_assign_) {
    const auto arithmetic = at::toOpMathType(stored);
    if (c10::toRealValueType(arithmetic) == c10::kDouble) {
      numbers_double_.emplace(step);
    } else {
      numbers_float_.emplace(step);
    }
    with_type(arithmetic, [&](auto zero) {
      weight_ = access<decltype(zero)>(stored);
    });
  } else if (is_uniform) {
    dense_add_ = cpu::dense_add(stored);
    // A view may give a bool bytes other than 0 and 1; a sum normalizes them.
    is_copy_ = values.size() == 1 && stored != c10::kBool;
    const bool needs_no_blocks = is_copy_ || dense_add_.function != nullptr;
    if (needs_no_blocks && layout == Layout::kDense) {
      return;
    }
  }
  with_type(accumulation, [&](auto zero) {
    using acc_t = decltype(zero);
    constexpr auto kAccumulation = c10::CppTypeToScalarType<acc_t>::value;
    sum_blocks_ = &SumLine::sum_blocks<acc_t>;
    store_ = access<acc_t>(stored).store;
    bool is_ready = true;
    for (const auto dtype : values) {
      loads_.push_back(access<acc_t>(dtype).load);
      is_ready = is_ready && dtype == kAccumulation;
    }
    if (is_ready) {
      ready_add_ = cpu::dense_add(kAccumulation);
    }
  });
}

// values --> total[kBlock] --> rule --> stored, block by block.
template <typename acc_t>
void SumLine::sum_blocks(Line& line, bool stream, SquaredNorm* squared_norm)
    const {
  const size_t num_values = sizes_.size();
  c10::SmallVector<const char*, 8> moved; // the values, after the first block
  const bool is_ready = ready_add_.function != nullptr &&
      (line.strides == sizes_.data() ||
       std::equal(sizes_.begin(), sizes_.end(), line.strides));
  // One value that has the type of a sum, and that writing the result does not
  // change, is the gradient where it is.
  const bool is_gradient = is_ready && num_values == 1 && !is_assign_ &&
      squared_norm == nullptr && line.values[0] != line.stored &&
      reinterpret_cast<uintptr_t>(line.values[0]) % alignof(acc_t) == 0;
  alignas(kCacheLine) acc_t total[kBlock];
  alignas(kCacheLine) char rounded[kBlock * sizeof(c10::complex<double>)];
  const int64_t head =
      stream ? head_of(line.stored, line.num_elements, stored_size_) : 0;
  int64_t size = std::min(head > 0 ? head : line.num_elements, kBlock);
  while (line.num_elements > 0) {
    const acc_t* sum = total;
    if (is_gradient) {
      sum = reinterpret_cast<const acc_t*>(line.values[0]);
    } else if (is_ready) {
      ready_add_.function(
          line.values,
          num_values,
          reinterpret_cast<char*>(total),
          size * ready_add_.numbers_per_element,
          /*stream=*/false);
    } else {
      for (size_t k = 0; k < num_values; ++k) {
        loads_[k](line.values[k], line.strides[k], k != 0, total, size);
      }
    }
    if (squared_norm != nullptr) {
      squared_norm->sum += squares(total, size, squared_norm->scale);
    } else if (!is_assign_) {
      update_block(sum, total, line, size);
    } else if (stream) {
      store_(total, rounded, stored_size_, size);
      copy_line(rounded, line.stored, size * stored_size_, /*stream=*/true);
    } else {
      store_(total, line.stored, line.stored_stride, size);
    }
    line.num_done += size;
    line.num_elements -= size;
    if (line.num_elements == 0) {
      break;
    }
    if (moved.empty()) {
      moved.assign(line.values, line.values + num_values);
      line.values = moved.data();
    }
    for (size_t k = 0; k < num_values; ++k) {
      moved[k] += size * line.strides[k];
    }
    line.stored += size * line.stored_stride;
    size = std::min(line.num_elements, kBlock);
  }
}

// Of the gradients in a block, as the rule sees them.
template <typename acc_t>
double SumLine::squares(acc_t* total, int64_t size, double scale) const {
  if constexpr (std::is_integral_v<acc_t>) {
    TORCHKV_INTERNAL_ASSERT(false, "an optimizer on integers");
  } else {
    using real_t = typename c10::scalar_value_type<acc_t>::type;
    const int64_t count = size * (c10::is_complex<acc_t>::value ? 2 : 1);
    auto* numbers = reinterpret_cast<real_t*>(total);
    if constexpr (std::is_same_v<real_t, double>) {
      if (numbers_float_) { // fp64 gradients of an fp32 value: may overflow
        alignas(kCacheLine) float converted[2 * kBlock];
        std::transform(numbers, numbers + count, converted, [](double number) {
          return c10::convert<float>(number);
        });
        return cpu::squared_norm(step_, converted, count, scale);
      }
    }
    return cpu::squared_norm(step_, numbers, count, scale);
  }
}

// Applies the rule to a block in the arithmetic of the stored dtype: fp64 for
// fp64 and complex128, else fp32. May overwrite `total`, which may be the sum.
template <typename acc_t>
void SumLine::update_block(
    const acc_t* sum,
    acc_t* total,
    const Line& line,
    int64_t size) const {
  if constexpr (std::is_integral_v<acc_t>) {
    TORCHKV_INTERNAL_ASSERT(false, "an optimizer on integers");
  } else if (numbers_double_) {
    update_block(*numbers_double_, sum, total, line, size);
  } else if (numbers_float_) {
    update_block(*numbers_float_, sum, total, line, size);
  } else {
    TORCHKV_INTERNAL_ASSERT(false);
  }
}

template <typename weight_t>
void SumLine::follow_writes(weight_t* master, const Line& line, int64_t size)
    const {
  using real_t = typename c10::scalar_value_type<weight_t>::type;
  alignas(kCacheLine) char narrow[kBlock * sizeof(weight_t)];
  weight_.store(master, narrow, stored_size_, size);
  if (line.stored_stride == stored_size_ &&
      std::memcmp(narrow, line.stored, size * stored_size_) == 0) {
    return; // as nearly always
  }
  alignas(kCacheLine) weight_t stored[kBlock];
  alignas(kCacheLine) weight_t rounded[kBlock];
  weight_.load(line.stored, line.stored_stride, /*is_add=*/false, stored, size);
  weight_.load(narrow, stored_size_, /*is_add=*/false, rounded, size);
  auto* const own = reinterpret_cast<real_t*>(master);
  const auto* const kept = reinterpret_cast<const real_t*>(rounded);
  const auto* const written = reinterpret_cast<const real_t*>(stored);
  const int64_t num_numbers = size * (c10::is_complex<weight_t>::value ? 2 : 1);
  for (int64_t i = 0; i < num_numbers; ++i) {
    own[i] = kept[i] == written[i] ? own[i] : written[i];
  }
}

template <typename acc_t, typename real_t>
void SumLine::update_block(
    const RuleNumbers<real_t>& numbers,
    const acc_t* sum,
    acc_t* total,
    const Line& line,
    int64_t size) const {
  const StateLine& state = *line.state;
  constexpr bool kComplex = c10::is_complex<acc_t>::value;
  using weight_t = std::conditional_t<kComplex, c10::complex<real_t>, real_t>;
  const int64_t num_numbers = size * (kComplex ? 2 : 1);
  const auto num_bytes = line.num_done * static_cast<int64_t>(sizeof(weight_t));
  const auto at_block = [&](char* data) {
    return data == nullptr ? nullptr : data + num_bytes;
  };

  alignas(kCacheLine) weight_t converted[kBlock];
  const auto* gradients = reinterpret_cast<const real_t*>(sum);
  auto* scratch = reinterpret_cast<real_t*>(total);
  if constexpr (!std::is_same_v<acc_t, weight_t>) {
    for (int64_t i = 0; i < size; ++i) {
      converted[i] = c10::convert<weight_t>(sum[i]);
    }
    gradients = scratch = reinterpret_cast<real_t*>(converted);
  }

  // The weights in place, if their memory has the type and alignment for it.
  alignas(kCacheLine) weight_t loaded[kBlock];
  auto* weights = reinterpret_cast<weight_t*>(at_block(state.master));
  const bool in_place = weights == nullptr &&
      stored_ == c10::CppTypeToScalarType<weight_t>::value &&
      line.stored_stride == stored_size_ &&
      reinterpret_cast<uintptr_t>(line.stored) % alignof(weight_t) == 0;
  if (in_place) {
    weights = reinterpret_cast<weight_t*>(line.stored);
  } else if (weights == nullptr) {
    weights = loaded;
    weight_.load(
        line.stored, line.stored_stride, /*is_add=*/false, loaded, size);
  }

  if (state.follows_writes) {
    follow_writes(weights, line, size);
  }

  std::array<real_t*, kMaxStates> states{};
  for (size_t i = 0; i < kMaxStates; ++i) {
    states[i] = reinterpret_cast<real_t*>(at_block(state.states[i]));
  }
  apply_rule<real_t>(
      step_,
      numbers,
      {gradients,
       scratch,
       reinterpret_cast<real_t*>(weights),
       states,
       num_numbers,
       (state.begin + line.num_done) * (kComplex ? 2 : 1)});
  if (!in_place) {
    weight_.store(weights, line.stored, line.stored_stride, size);
  }
}

void SumLine::dense(
    const char* const* values,
    char* stored,
    const StateLine& state,
    int64_t num_elements,
    bool stream) const {
  const size_t num_values = sizes_.size();
  // A rule has just read the stored value into the cache.
  stream = stream && is_assign_;
  if (is_copy_) {
    copy_line(values[0], stored, num_elements * stored_size_, stream);
    return;
  }
  if (dense_add_.function == nullptr) {
    Line line{
        values, sizes_.data(), stored, stored_size_, &state, num_elements};
    (this->*sum_blocks_)(line, stream, nullptr);
    return;
  }
  const int64_t number_size = stored_size_ / dense_add_.numbers_per_element;
  int64_t num_numbers = num_elements * dense_add_.numbers_per_element;
  c10::SmallVector<const char*, 8> after_head;
  if (stream) {
    const int64_t head = head_of(stored, num_numbers, number_size);
    dense_add_.function(values, num_values, stored, head, /*stream=*/false);
    for (size_t k = 0; k < num_values; ++k) {
      after_head.push_back(values[k] + head * number_size);
    }
    values = after_head.data();
    stored += head * number_size;
    num_numbers -= head;
    stream = bytes_to_alignment(stored) == 0;
  }
  dense_add_.function(values, num_values, stored, num_numbers, stream);
}

double SumLine::squared_norm(
    const char* const* values,
    int64_t num_elements,
    double scale) const {
  TORCHKV_INTERNAL_ASSERT(!is_assign_);
  SquaredNorm norm{scale, 0};
  Line line{
      values, sizes_.data(), nullptr, stored_size_, nullptr, num_elements};
  (this->*sum_blocks_)(line, /*stream=*/false, &norm);
  return norm.sum;
}

void SumLine::strided(
    const char* const* values,
    const int64_t* value_strides,
    char* stored,
    int64_t stored_stride,
    const StateLine& state,
    int64_t num_elements) const {
  if (num_elements == 1) {
    stored_stride = stored_size_; // the stride of one element is arbitrary
  }
  if (stored_stride == stored_size_ &&
      std::equal(sizes_.begin(), sizes_.end(), value_strides)) {
    dense(values, stored, state, num_elements, /*stream=*/false);
    return;
  }
  Line line{values, value_strides, stored, stored_stride, &state, num_elements};
  (this->*sum_blocks_)(line, /*stream=*/false, nullptr);
}

} // namespace torchkv::kernels::cpu

#include "select_top.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "../codecs.h"
#include "cache_line.h"
#include "compressed_tile.h"
#include "parallel.h"

namespace torchkv::kernels::cpu {
namespace {

constexpr int64_t kTopBlock = 1024; // elements, in the first-level cache
constexpr int64_t kTopSpan = 64 * kTopBlock; // so that few threads merge counts
constexpr uint32_t kTopDigitBits = 11;
constexpr uint64_t kTopDigits = uint64_t{1} << kTopDigitBits;
using TopCounts = std::array<int64_t, kTopDigits>;

// The magnitudes of value + residual, in blocks.
template <typename T>
class Magnitudes {
 public:
  using bits_t = codecs::bits_t<T>;

  Magnitudes(const char* value, c10::ScalarType dtype, const char* residual)
      : value_(value),
        stride_(static_cast<int64_t>(c10::elementSize(dtype))),
        dtype_(dtype),
        residual_(reinterpret_cast<const T*>(residual)) {}

  // Calls `visit(bits, first, size)` with the blocks of [begin, end).
  template <class Visit>
  void for_each(int64_t begin, int64_t end, Visit visit) const {
    alignas(kCacheLine) T values[kTopBlock];
    alignas(kCacheLine) bits_t bits[kTopBlock];
    for (int64_t i = begin; i < end; i += kTopBlock) {
      const int64_t size = std::min(kTopBlock, end - i);
      load_sum<T>(
          value_ + i * stride_,
          dtype_,
          residual_ == nullptr ? nullptr : residual_ + i,
          values,
          size);
      for (int64_t j = 0; j < size; ++j) {
        bits[j] = codecs::magnitude_bits(values[j]);
      }
      if (!visit(static_cast<const bits_t*>(bits), i, size)) {
        return;
      }
    }
  }

 private:
  const char* value_;
  int64_t stride_;
  c10::ScalarType dtype_;
  const T* residual_;
};

// How many magnitudes, of those whose bits from `left` on are those of
// `prefix`, have each digit at `shift`.
template <typename T>
TopCounts count_digits(
    const Magnitudes<T>& magnitudes,
    int64_t num_elements,
    uint64_t prefix,
    uint32_t left,
    uint32_t shift) {
  TopCounts counts{};
  std::mutex mutex; // guards counts
  const auto bytes = static_cast<int64_t>(2 * sizeof(T));
  parallel_spans(
      1,
      [&](int64_t /*job*/) { return Work{num_elements, bytes, kTopSpan}; },
      [&](int64_t /*job*/, int64_t begin, int64_t end, bool /*stream*/) {
        TopCounts own{};
        magnitudes.for_each(
            begin, end, [&](const auto* bits, int64_t /*first*/, int64_t size) {
              for (int64_t i = 0; i < size; ++i) {
                const uint64_t number = bits[i];
                if (number >> left == prefix >> left) {
                  ++own[(number >> shift) % kTopDigits];
                }
              }
              return true;
            });
        const std::lock_guard lock(mutex);
        for (size_t digit = 0; digit < kTopDigits; ++digit) {
          counts[digit] += own[digit];
        }
      });
  return counts;
}

template <typename T>
TopElements select(
    const Magnitudes<T>& magnitudes,
    int64_t num_elements,
    int64_t count) {
  constexpr uint32_t kBits = 8 * sizeof(T) - 1; // without the sign
  uint64_t prefix = 0;
  int64_t ties = num_elements; // elements with the prefix
  int64_t wanted = count; // of them
  for (uint32_t left = kBits; left > 0;) {
    const uint32_t shift = left > kTopDigitBits ? left - kTopDigitBits : 0;
    const TopCounts counts =
        count_digits(magnitudes, num_elements, prefix, left, shift);
    uint64_t digit = kTopDigits - 1;
    while (counts[digit] < wanted) {
      wanted -= counts[digit--];
    }
    ties = counts[digit];
    prefix |= digit << shift;
    left = shift;
  }
  if (wanted == ties) {
    return {prefix, num_elements};
  }
  int64_t ties_end = 0;
  magnitudes.for_each(
      0, num_elements, [&](const auto* bits, int64_t first, int64_t size) {
        for (int64_t i = 0; i < size; ++i) {
          wanted -= bits[i] == prefix ? 1 : 0;
          if (wanted == 0) {
            ties_end = first + i + 1;
            return false;
          }
        }
        return true;
      });
  return {prefix, ties_end};
}

} // namespace

TopElements select_top(
    const char* value,
    c10::ScalarType dtype,
    const char* residual,
    c10::ScalarType residual_dtype,
    int64_t num_elements,
    int64_t count) {
  if (residual_dtype == c10::kDouble) {
    return select<double>({value, dtype, residual}, num_elements, count);
  }
  return select<float>({value, dtype, residual}, num_elements, count);
}

} // namespace torchkv::kernels::cpu

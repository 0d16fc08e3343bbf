// Normally distributed numbers: their distribution, the two uniform numbers
// that they are made of, and the ends of their range.
#include "core/normal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "core/mixed_bits.h"

namespace torchkv {
namespace {

// Of the bits that make these.
float number_of(uint64_t high, uint64_t low) {
  return normal_number((high << 40U) | (uint64_t{0xABCD} << 24U) | low);
}

TEST(NormalTest, IsTheFormulaOfBoxAndMuller) {
  constexpr uint64_t kMost = 0xFFFFFF;
  for (uint64_t high = 0; high <= kMost; high += 99991) {
    for (uint64_t low = 0; low <= kMost; low += 99991) {
      const double u = static_cast<double>(high + 1) * 0x1p-24;
      const double v = static_cast<double>(low) * 0x1p-24 - 0.5;
      const double expected =
          std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
      EXPECT_NEAR(number_of(high, low), expected, 2e-6) << high << ' ' << low;
    }
  }
}

TEST(NormalTest, IsFiniteAtTheEnds) {
  constexpr uint64_t kHalf = 0x800000; // v == 0
  EXPECT_EQ(number_of(0xFFFFFF, kHalf), 0); // log(1)
  EXPECT_NEAR(number_of(0, kHalf), std::sqrt(48 * std::log(2)), 1e-5);
  EXPECT_NEAR(number_of(0, 0), -std::sqrt(48 * std::log(2)), 1e-5);
}

// Kolmogorov and Smirnov's test, whose statistic exceeds 1.95 / sqrt(n) once in
// a thousand times; the numbers are always the same.
TEST(NormalTest, HasTheStandardNormalDistribution) {
  constexpr int64_t kCount = 1000000;
  for (const uint64_t stream : {uint64_t{0}, uint64_t{1} << 63U}) {
    std::vector<double> numbers;
    double product = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      numbers.push_back(
          normal_number(mixed_bits(stream + static_cast<uint64_t>(i))));
      product += i == 0 ? 0 : numbers[i] * numbers[i - 1];
    }
    EXPECT_LT(std::abs(product), 4 * std::sqrt(kCount)); // not correlated
    std::sort(numbers.begin(), numbers.end());
    double largest = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      const double expected = 0.5 * std::erfc(-numbers[i] / std::sqrt(2));
      const double own = (static_cast<double>(i) + 0.5) / kCount;
      largest = std::max(largest, std::abs(own - expected));
    }
    EXPECT_LT(largest, 1.95 / std::sqrt(kCount));
  }
}

} // namespace
} // namespace torchkv

#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "comm/send.h"
#include "comm/send_with_aten.h"
#include "core/codec.h"
#include "kernels/cpu/compressed_sums.h"
#include "kernels/cpu/select_top.h"

// What codecs send of values, by the CPU's kernels: what others must send.
namespace torchkv::testing {

constexpr uint64_t kSentStream = 0xFEDCBA9876543210U;

inline Codec sent_codec(Codec::Id id) {
  Codec codec;
  codec.id = id;
  codec.threshold = 0.3;
  codec.ratio = 0.1;
  return codec;
}

inline std::string name_of_codec(
    const ::testing::TestParamInfo<Codec::Id>& param) {
  return std::string("of_") + name_of(sent_codec(param.param));
}

inline SentSum expected_sum(
    const Codec& codec,
    c10::ArrayRef<ToSend> values,
    c10::ScalarType dtype) {
  SentSum result;
  std::vector<kernels::cpu::CompressedSource> sources;
  for (const auto& value : values) {
    auto& source = sources.emplace_back();
    source.data = static_cast<const char*>(value.value.const_data_ptr());
    source.dtype = value.value.scalar_type();
    source.codec = codec;
    source.stream = value.stream;
    at::Tensor& residual = result.residuals.emplace_back();
    if (value.residual.defined()) {
      residual = value.residual.clone();
      source.residual = static_cast<char*>(residual.mutable_data_ptr());
    }
    if (codec.id == Codec::Id::kTopK) {
      const auto top = kernels::cpu::select_top(
          source.data,
          source.dtype,
          source.residual,
          dtype,
          value.value.numel(),
          codec.num_sent(value.value.numel()));
      source.least_bits = top.least_bits;
      source.ties_end = top.ties_end;
    }
  }
  result.sum = at::empty(values[0].value.sizes(), dtype);
  kernels::cpu::CompressedSumBatch batch;
  batch.add({sources, 0, result.sum, dtype});
  batch.run();
  return result;
}

inline Sent expected_sent(
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype) {
  SentSum sum = expected_sum(codec, {{value, residual, kSentStream}}, dtype);
  return {sum.sum, sum.residuals[0]};
}

// NaN has many bits.
inline void expect_same_numbers(
    const at::Tensor& actual,
    const at::Tensor& expected,
    const char* what) {
  ASSERT_EQ(actual.defined(), expected.defined()) << what;
  if (!expected.defined()) {
    return;
  }
  ASSERT_EQ(actual.scalar_type(), expected.scalar_type()) << what;
  const at::Tensor same = actual.isnan()
                              .logical_and(expected.isnan())
                              .logical_or(actual.eq(expected));
  EXPECT_TRUE(same.all().item<bool>())
      << what << ' ' << (~same).sum().item<int64_t>() << " differ, the first "
      << actual.index({~same})[0].item<double>() << " instead of "
      << expected.index({~same})[0].item<double>();
}

// Calls `check(value, dtype of the arithmetic)`.
template <class Check>
void check_numbers(Check check) {
  at::manual_seed(0);
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const auto of_value :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (const int64_t size : {1, 127, 1024, 5000}) {
        check(at::randn({size}, at::kDouble).to(of_value), dtype);
      }
    }
  }
}

template <class Check>
void check_extreme_numbers(Check check) {
  at::manual_seed(0);
  using Limits = std::numeric_limits<float>;
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    // All magnitudes, from subnormal numbers on.
    const at::Tensor magnitudes =
        at::randn({5000}, at::kDouble)
            .mul_(at::pow(10, at::randint(-46, 39, {5000}).to(at::kDouble)));
    check(magnitudes.to(at::kFloat), dtype);
    check(at::zeros({300}), dtype);
    check(at::full({300}, 1e-44F), dtype);
    at::Tensor infinite = at::randn({3000});
    infinite.slice(0, 100, 3000, 371).fill_(Limits::infinity());
    infinite.slice(0, 200, 3000, 371).fill_(-Limits::infinity());
    infinite.slice(0, 300, 3000, 371).fill_(Limits::quiet_NaN());
    check(infinite, dtype);
    check(at::randint(-3, 3, {3000}).to(at::kFloat), dtype); // ties
    for (const auto of_value : {at::kHalf, at::kBFloat16}) {
      check(infinite.to(of_value), dtype);
      check(magnitudes.to(of_value), dtype);
    }
  }
  // Beyond the range of fp32; not near the greatest fp64 number.
  check(
      at::randn({5000}, at::kDouble)
          .mul_(at::pow(10, at::randint(-320, 290, {5000}).to(at::kDouble))),
      at::kDouble);
}

} // namespace torchkv::testing

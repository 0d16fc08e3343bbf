// Sums of compressed values: the bits of a loop over single numbers, with which
// rules step as with the sum of dense values; for whole values and parts.
#include "kernels/cpu/compressed_sums.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "core/mixed_bits.h"
#include "kernels/codecs.h"
#include "kernels/cpu/sum.h"
#include "pushed.h"
#include "rule_cases.h"
#include "state_line.h"

namespace torchkv {
namespace {

using kernels::cpu::CompressedSource;
using kernels::cpu::CompressedSumBatch;
using kernels::cpu::SumBatch;
using Id = Codec::Id;

template <typename T>
T plain_sent(
    const CompressedSource& source,
    T value,
    int64_t i,
    codecs::Scale<T> scale) {
  const auto threshold = static_cast<T>(source.codec.threshold);
  switch (source.codec.id) {
    case Id::k1Bit:
      return codecs::sent_1bit(value, threshold);
    case Id::k2Bit:
      return codecs::sent_2bit(value, threshold);
    case Id::kFp16:
      return codecs::sent_fp16(value);
    case Id::kBf16:
      return codecs::sent_bf16(value);
    case Id::kFp8:
      return codecs::sent_fp8(value, scale);
    case Id::kInt4: {
      const auto block = static_cast<uint64_t>(i / 128);
      const auto stream =
          static_cast<uint32_t>(mixed_bits(source.stream + block));
      return codecs::sent_int4(
          value,
          scale,
          codecs::random_from_8(stream + static_cast<uint32_t>(i % 128)));
    }
    case Id::kTopK:
      return codecs::sent_topk(
          value,
          static_cast<codecs::bits_t<T>>(source.least_bits),
          i,
          source.ties_end);
    case Id::kNone:
      break;
  }
  return value;
}

// What all values together send, number by number; updates the residuals.
template <typename T>
at::Tensor plain_sum(const std::vector<Pushed>& all) {
  constexpr auto kDtype = c10::CppTypeToScalarType<T>::value;
  const int64_t size = all[0].value.numel();
  const at::Tensor total = at::empty({size}, kDtype);
  T* const sum = total.mutable_data_ptr<T>();
  for (size_t k = 0; k < all.size(); ++k) {
    const Pushed& one = all[k];
    const bool is_mxnet =
        one.codec.id == Id::k1Bit || one.codec.id == Id::k2Bit;
    // The order of a sum of two does not matter.
    at::Tensor whole = one.value.to(kDtype);
    if (one.residual.defined()) {
      whole = whole + one.residual;
    }
    const T* const values = whole.const_data_ptr<T>();
    const int64_t block = std::max(one.codec.block_size(), int64_t{1});
    for (int64_t begin = 0; begin < size; begin += block) {
      const int64_t end = std::min(begin + block, size);
      T largest = 0;
      for (int64_t i = begin; i < end; ++i) {
        largest = std::isfinite(values[i])
            ? std::max(largest, std::abs(values[i]))
            : largest;
      }
      const auto scale = codecs::scale_of(
          largest,
          one.codec.id == Id::kFp8 ? codecs::kFp8Max : codecs::kInt4Max);
      for (int64_t i = begin; i < end; ++i) {
        const T sent = plain_sent(one.source, values[i], i, scale);
        sum[i] = k == 0 ? sent : sum[i] + sent;
        if (one.residual.defined()) {
          one.residual.mutable_data_ptr<T>()[i] = is_mxnet
              ? values[i] - sent
              : codecs::residual_of(values[i], sent);
        }
      }
    }
  }
  return total;
}

// The elements [begin, end) of the values in one job.
void add_part(
    CompressedSumBatch& batch,
    const std::vector<Pushed>& all,
    const at::Tensor& stored,
    at::ScalarType arithmetic,
    int64_t begin,
    const RuleStep& step = kAssignStep,
    const kernels::cpu::StateLine& state = {}) {
  std::vector<CompressedSource> sources;
  for (const auto& one : all) {
    sources.push_back(one.source);
    sources.back().data +=
        begin * static_cast<int64_t>(one.value.element_size());
    if (one.residual.defined()) {
      sources.back().residual +=
          begin * static_cast<int64_t>(one.residual.element_size());
    }
  }
  batch.add({sources, begin, stored, arithmetic, step, state});
}

constexpr std::array<int64_t, 6> kSizes{1, 127, 128, 1025, 4096, 100'003};

template <typename T>
void check_assign(at::ScalarType dtype, at::ScalarType stored_dtype) {
  constexpr auto kDtype = c10::CppTypeToScalarType<T>::value;
  for (const Id id : kCodecs) {
    for (const int64_t size : kSizes) {
      const std::vector<Pushed> all{
          pushed(id, size, dtype, kDtype, false),
          pushed(Id::kNone, size, kDtype, kDtype, false),
          pushed(id, size, dtype, kDtype, false)};
      const auto expected = clone(all);
      const at::Tensor stored = at::empty({size}, stored_dtype);
      CompressedSumBatch batch;
      add_part(batch, all, stored, kDtype, 0);
      batch.run();
      SCOPED_TRACE(
          ::testing::Message() << name_of(codec_of(id)) << ' ' << size);
      expect_same_bits(stored, plain_sum<T>(expected).to(stored_dtype));
      for (size_t k = 0; k < all.size(); ++k) {
        expect_same_bits(all[k].residual, expected[k].residual);
      }
    }
  }
}

TEST(CompressedSumsTest, HaveTheBitsOfAPlainLoop) {
  at::manual_seed(1);
  check_assign<float>(at::kFloat, at::kFloat);
  check_assign<float>(at::kBFloat16, at::kHalf);
  check_assign<double>(at::kDouble, at::kDouble);
  check_assign<double>(at::kHalf, at::kDouble);
}

TEST(CompressedSumsTest, PartsHaveTheBitsOfTheWhole) {
  at::manual_seed(2);
  constexpr int64_t kSize = 5000;
  for (const Id id : kCodecs) {
    const std::vector<Pushed> all{
        pushed(id, kSize, at::kFloat, at::kFloat, true),
        pushed(id, kSize, at::kHalf, at::kFloat, true)};
    const auto expected = clone(all);
    const at::Tensor stored = at::empty({kSize});
    std::vector<at::Tensor> parts;
    CompressedSumBatch batch;
    const std::vector<int64_t> cuts{0, 4, 1000, 1003, 4999, kSize};
    for (size_t i = 1; i < cuts.size(); ++i) {
      parts.push_back(stored.slice(0, cuts[i - 1], cuts[i]));
      add_part(batch, all, parts.back(), at::kFloat, cuts[i - 1]);
    }
    batch.run();
    SCOPED_TRACE(name_of(codec_of(id)));
    expect_same_bits(stored, plain_sum<float>(expected));
    for (size_t k = 0; k < all.size(); ++k) {
      expect_same_bits(all[k].residual, expected[k].residual);
    }
  }
}

TEST(CompressedSumsTest, NumbersThatAreNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Id id : kCodecs) {
    std::vector<Pushed> all{
        pushed(Id::kNone, 300, at::kFloat, at::kFloat, false)};
    all[0].value.slice(0, 3, 6).copy_(
        at::tensor({kInfinity, -kInfinity, kNan}));
    all[0].value.slice(0, 200, 202).copy_(at::tensor({3e38F, -3e38F}));
    all[0].value.slice(0, 203, 205).copy_(at::tensor({1e-44F, -1e-44F}));
    all[0].codec = all[0].source.codec = codec_of(id);
    if (all[0].codec.has_feedback()) {
      all[0].residual = at::zeros({300});
      all[0].source.residual =
          static_cast<char*>(all[0].residual.mutable_data_ptr());
    }
    all[0].source.ties_end = 4; // topk sends all but zeros
    const auto expected = clone(all);
    const at::Tensor stored = at::empty({300});
    CompressedSumBatch batch;
    add_part(batch, all, stored, at::kFloat, 0);
    batch.run();
    SCOPED_TRACE(name_of(codec_of(id)));
    const at::Tensor sum = plain_sum<float>(expected);
    EXPECT_TRUE(at::allclose(stored, sum, 0, 0, /*equal_nan=*/true));
    if (id != Id::k1Bit && id != Id::k2Bit && all[0].residual.defined()) {
      EXPECT_TRUE(all[0].residual.isfinite().all().item<bool>());
    }
  }
}

// Blocks whose scale would not be a normal number send nothing.
TEST(CompressedSumsTest, TinyBlocks) {
  for (const Id id : {Id::kFp8, Id::kInt4}) {
    for (const float value : {0.0F, 1e-45F, 1e-38F}) {
      const Codec codec = codec_of(id);
      const at::Tensor values = at::full({64}, value);
      const at::Tensor residual = at::zeros({64});
      CompressedSource source;
      source.data = bytes_of(values);
      source.codec = codec;
      source.residual = codec.has_feedback()
          ? static_cast<char*>(residual.mutable_data_ptr())
          : nullptr;
      const at::Tensor stored = at::ones({64});
      CompressedSumBatch batch;
      batch.add({source, 0, stored, at::kFloat});
      batch.run();
      EXPECT_TRUE(stored.equal(at::zeros({64}))) << value;
      if (codec.has_feedback()) {
        EXPECT_TRUE(residual.equal(values)) << value;
      }
    }
  }
}

class CompressedSumsOfRule
    : public ::testing::TestWithParam<testing::RuleCase> {};

// A rule's step, and the norm, are those of SumBatch with the sum.
TEST_P(CompressedSumsOfRule, StepsWithTheSum) {
  const RuleStep step = without_norms({GetParam().rule, 3, /*is_first=*/false});
  const auto names = state_names(step.rule);
  for (const Id id : {Id::k2Bit, Id::kFp8}) {
    const std::vector<Pushed> all{
        pushed(id, 3000, at::kFloat, at::kFloat, false),
        pushed(id, 3000, at::kFloat, at::kFloat, false)};
    const at::Tensor sum = plain_sum<float>(clone(all));
    const at::Tensor stored = at::randn({3000});
    std::array<at::Tensor, kMaxStates> states;
    std::array<at::Tensor, kMaxStates> expected_states;
    for (size_t i = 0; i < kMaxStates; ++i) {
      if (names[i] != nullptr) {
        states[i] = at::rand({3000}) + 0.5;
        expected_states[i] = states[i].clone();
      }
    }
    const at::Tensor expected = stored.clone();
    const Value value(&sum);
    SumBatch plain;
    plain.add(
        {value,
         expected,
         at::kFloat,
         step,
         testing::state_line(expected_states)});
    CompressedSumBatch batch;
    add_part(
        batch, all, stored, at::kFloat, 0, step, testing::state_line(states));
    const auto before = clone(all);
    EXPECT_NEAR(batch.squared_norm(1), plain.squared_norm(1), 1e-3);
    for (size_t k = 0; k < all.size(); ++k) {
      expect_same_bits(
          all[k].residual, before[k].residual); // a norm keeps them
    }
    plain.run();
    batch.run();
    expect_same_bits(stored, expected);
    for (size_t i = 0; i < kMaxStates; ++i) {
      expect_same_bits(states[i], expected_states[i]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllRules,
    CompressedSumsOfRule,
    ::testing::ValuesIn(testing::rule_cases_that(is_elementwise)),
    [](const auto& info) { return info.param.name; });

TEST(CompressedSumsTest, EmptyValuesDoNothing) {
  const at::Tensor stored = at::empty({0});
  CompressedSource source;
  source.data = bytes_of(stored);
  source.codec = codec_of(Id::k2Bit);
  CompressedSumBatch batch;
  batch.add({source, 0, stored, at::kFloat});
  batch.run();
  EXPECT_EQ(batch.squared_norm(1), 0);
}

} // namespace
} // namespace torchkv

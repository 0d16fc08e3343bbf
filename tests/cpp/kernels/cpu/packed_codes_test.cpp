// Packed codes: what comes out is what sums of the same values add up, and the
// residuals are theirs; bytes that are no codes are refused.
#include "kernels/cpu/packed_codes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <list>
#include <random>
#include <string>
#include <vector>

#include "core/errors.h"
#include "dist/protocol/slice.h"
#include "kernels/cpu/compressed_sums.h"
#include "pushed.h"

namespace torchkv {
namespace {

using kernels::cpu::CompressedSource;
using kernels::cpu::CompressedSumBatch;
using kernels::cpu::pack_codes;
using kernels::cpu::PackedCodes;
using Id = Codec::Id;

// The elements of a value from `begin` on.
CompressedSource part_of(const Pushed& value, int64_t begin) {
  CompressedSource source = value.source;
  source.data += begin * static_cast<int64_t>(value.value.element_size());
  if (value.residual.defined()) {
    source.residual +=
        begin * static_cast<int64_t>(value.residual.element_size());
  }
  return source;
}

// At an address that no number is aligned to.
std::vector<char> pack(
    const CompressedSource& source,
    int64_t begin,
    int64_t size,
    at::ScalarType dtype) {
  std::vector<char> bytes;
  pack_codes(source, begin, size, dtype, [&](int64_t num_bytes) {
    dist::KeySpec spec;
    spec.total = size;
    EXPECT_LE(num_bytes, dist::max_encoded_bytes(spec));
    bytes.resize(static_cast<size_t>(num_bytes) + 1);
    return bytes.data() + 1;
  });
  return bytes;
}

PackedCodes codes_in(const std::vector<char>& bytes, int64_t size) {
  return {bytes.data() + 1, static_cast<int64_t>(bytes.size()) - 1, size};
}

// What sources add up to, element `begin` of the value being the first.
at::Tensor sum_of(
    const std::vector<CompressedSource>& sources,
    int64_t begin,
    int64_t size,
    at::ScalarType dtype) {
  at::Tensor sum = at::empty({size}, dtype);
  CompressedSumBatch batch;
  batch.add({sources, begin, sum, dtype});
  batch.run();
  return sum;
}

void check_round_trip(
    Id id,
    int64_t size,
    const std::vector<int64_t>& cuts,
    at::ScalarType dtype,
    at::ScalarType arithmetic) {
  const Pushed value = pushed(id, size, dtype, arithmetic, /*in_parts=*/true);
  const Pushed other = clone({value})[0];
  const at::Tensor before = at::randn({size}, arithmetic);
  for (size_t i = 1; i < cuts.size(); ++i) {
    const int64_t begin = cuts[i - 1];
    const int64_t count = cuts[i] - begin;
    SCOPED_TRACE(
        ::testing::Message() << name_of(value.codec) << " from " << begin);
    CompressedSource dense;
    dense.data =
        bytes_of(before) + begin * static_cast<int64_t>(before.element_size());
    dense.dtype = arithmetic;
    const at::Tensor expected =
        sum_of({dense, part_of(other, begin)}, begin, count, arithmetic);
    const auto bytes = pack(part_of(value, begin), begin, count, arithmetic);
    const PackedCodes codes = codes_in(bytes, count);
    EXPECT_EQ(codes.dtype(), arithmetic);
    CompressedSource packed;
    packed.codes = &codes;
    expect_same_bits(
        sum_of({dense, packed}, begin, count, arithmetic), expected);
    // Codes in fp32 are added up in fp64 where other values need it.
    const at::Tensor alone = sum_of({packed}, begin, count, arithmetic);
    expect_same_bits(
        sum_of({packed}, begin, count, at::kDouble), alone.to(at::kDouble));
  }
  expect_same_bits(value.residual, other.residual);
}

TEST(PackedCodesTest, AreWhatSumsAddUp) {
  at::manual_seed(1);
  for (const Id id : kCodecs) {
    for (const int64_t size : {0, 1, 5, 127, 1024, 1025, 4999, 50'003}) {
      const std::vector<int64_t> cuts{0, size};
      check_round_trip(id, size, cuts, at::kFloat, at::kFloat);
      check_round_trip(id, size, cuts, at::kHalf, at::kFloat);
      check_round_trip(id, size, cuts, at::kFloat, at::kDouble);
      check_round_trip(id, size, cuts, at::kDouble, at::kDouble);
    }
    const std::vector<int64_t> cuts{0, 4, 1000, 1003, 4999, 5000, 5000};
    check_round_trip(id, 5000, cuts, at::kFloat, at::kFloat);
    check_round_trip(id, 5000, cuts, at::kDouble, at::kDouble);
  }
}

TEST(PackedCodesTest, NumbersThatAreNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (const Id id : kCodecs) {
    Pushed value = pushed(id, 300, at::kFloat, at::kFloat, /*in_parts=*/false);
    value.value.slice(0, 3, 6).copy_(at::tensor({kInfinity, -kInfinity, kNan}));
    value.value.slice(0, 200, 202).copy_(at::tensor({3e38F, -3e38F}));
    value.value.slice(0, 203, 206).copy_(at::tensor({1e-44F, -1e-44F, -0.0F}));
    if (value.residual.defined()) {
      value.residual.zero_();
    }
    const int64_t block = std::max<int64_t>(value.codec.block_size(), 300);
    const at::Tensor largest = at::empty({(300 + block - 1) / block + 2});
    if (value.codec.block_size() != 0) {
      kernels::cpu::block_magnitudes(
          value.source.data,
          at::kFloat,
          value.source.residual,
          at::kFloat,
          300,
          value.codec.block_size(),
          static_cast<char*>(largest.mutable_data_ptr()));
      value.source.largest = bytes_of(largest);
    }
    value.source.least_bits = 0; // topk sends all
    value.source.ties_end = 300;
    const Pushed other = clone({value})[0];
    const at::Tensor expected = sum_of({other.source}, 0, 300, at::kFloat);
    const auto bytes = pack(value.source, 0, 300, at::kFloat);
    const PackedCodes codes = codes_in(bytes, 300);
    CompressedSource packed;
    packed.codes = &codes;
    const at::Tensor sum = sum_of({packed}, 0, 300, at::kFloat);
    SCOPED_TRACE(name_of(value.codec));
    EXPECT_TRUE(at::allclose(sum, expected, 0, 0, /*equal_nan=*/true));
    EXPECT_TRUE(sum.signbit().equal(expected.signbit()));
  }
}

TEST(PackedCodesTest, TakeTheBitsThatTheDocumentationNames) {
  at::manual_seed(2);
  constexpr int64_t kSize = 100'000;
  const std::vector<std::pair<Id, double>> bits{
      {Id::k1Bit, 1},
      {Id::k2Bit, 2},
      {Id::kFp16, 16},
      {Id::kBf16, 16},
      {Id::kFp8, 8 + 32.0 / 1024},
      {Id::kInt4, 4 + 32.0 / 128},
      {Id::kTopK, 0.1 * (32 + 16) + 64.0 / 1024}}; // codec_of sends a tenth
  for (const auto& [id, expected] : bits) {
    const Pushed value = pushed(id, kSize, at::kFloat, at::kFloat, true);
    const auto bytes = pack(value.source, 0, kSize, at::kFloat);
    EXPECT_NEAR(8.0 * static_cast<double>(bytes.size()) / kSize, expected, 0.01)
        << name_of(value.codec);
  }
}

TEST(PackedCodesTest, RefuseOtherBytes) {
  at::manual_seed(3);
  constexpr int64_t kSize = 3000;
  for (const Id id : kCodecs) {
    const Pushed value = pushed(id, kSize, at::kFloat, at::kFloat, true);
    const auto bytes = pack(value.source, 0, kSize, at::kFloat);
    const auto expect_refused = [&](const auto& change, int64_t size = 3000) {
      auto other = bytes;
      change(other);
      try {
        codes_in(other, size);
        ADD_FAILURE() << name_of(value.codec);
      } catch (const c10::ValueError& error) {
        EXPECT_NE(
            std::string(error.what()).find("compressed elements"),
            std::string::npos);
      }
    };
    const auto set = [](size_t at, char byte) {
      return [=](std::vector<char>& all) { all[at + 1] = byte; };
    };
    expect_refused([](auto& all) { all.pop_back(); });
    expect_refused([](auto& all) { all.push_back(0); });
    expect_refused([](auto& all) { all.resize(10); });
    expect_refused([](auto& /*all*/) {}, kSize - 1);
    expect_refused(set(0, 0)); // the codec
    expect_refused(set(0, 99));
    expect_refused(set(1, 5)); // the size of a number
    expect_refused(set(2, 1));
    expect_refused(set(7, 1)); // the index in a block
    expect_refused(set(8, 1)); // how many elements
    expect_refused(set(23, -1)); // how many of topk
    if (id == Id::kTopK) {
      expect_refused(set(32 + 7, -1)); // where a tile ends
      expect_refused(set(32 + 16, 0));
    }
  }
}

// A peer's bytes may be anything: no byte outside of them is read, which
// sanitizers would report.
TEST(PackedCodesTest, AnyBytesAreSafe) {
  at::manual_seed(4);
  std::mt19937 random(5); // NOLINT(cert-msc51-cpp): the same on every run
  constexpr int64_t kSize = 2500;
  for (const Id id : kCodecs) {
    const Pushed value = pushed(id, kSize, at::kFloat, at::kFloat, true);
    const auto bytes = pack(value.source, 0, kSize, at::kFloat);
    for (int i = 0; i < 300; ++i) {
      auto other = bytes;
      for (int j = 0; j < 4; ++j) {
        const bool in_header = random() % 2 == 0;
        const size_t range = in_header ? 64 : other.size() - 1;
        other[1 + random() % std::min(range, other.size() - 1)] =
            static_cast<char>(random());
      }
      try {
        const PackedCodes codes = codes_in(other, kSize);
        CompressedSource packed;
        packed.codes = &codes;
        sum_of({packed}, 0, kSize, at::kFloat);
      } catch (const c10::ValueError&) { // NOLINT(bugprone-empty-catch)
      }
    }
  }
}

} // namespace
} // namespace torchkv

// Values that replicas push with codecs, for the tests of kernels.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "kernels/cpu/compressed_tile.h"
#include "kernels/cpu/select_top.h"

namespace torchkv {

inline constexpr std::array<Codec::Id, 7> kCodecs{
    Codec::Id::k1Bit,
    Codec::Id::k2Bit,
    Codec::Id::kFp16,
    Codec::Id::kBf16,
    Codec::Id::kFp8,
    Codec::Id::kInt4,
    Codec::Id::kTopK};

// What a replica pushes, with what it left before; dense if the codec is none.
struct Pushed {
  Codec codec;
  at::Tensor value;
  at::Tensor residual;
  at::Tensor largest;
  kernels::cpu::CompressedSource source;
};

inline const char* bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<const char*>(tensor.const_data_ptr())
                          : nullptr;
}

inline Codec codec_of(Codec::Id id) {
  Codec codec;
  codec.id = id;
  codec.threshold = 0.375;
  codec.ratio = 0.1;
  return codec;
}

inline Pushed pushed(
    Codec::Id id,
    int64_t size,
    at::ScalarType dtype,
    at::ScalarType arithmetic,
    bool in_parts) {
  Pushed result;
  result.codec = codec_of(id);
  result.value = at::randn({size}, at::kDouble).to(dtype);
  auto& source = result.source;
  if (result.codec.has_feedback()) {
    result.residual = at::randn({size}, arithmetic).mul_(0.25);
    source.residual = static_cast<char*>(result.residual.mutable_data_ptr());
  }
  source.data = bytes_of(result.value);
  source.dtype = dtype;
  source.codec = result.codec;
  source.stream = 12345;
  if (id == Codec::Id::kTopK) {
    const auto top = kernels::cpu::select_top(
        source.data,
        dtype,
        source.residual,
        arithmetic,
        size,
        result.codec.num_sent(size));
    source.least_bits = top.least_bits;
    source.ties_end = top.ties_end;
  }
  if (const int64_t block = result.codec.block_size(); in_parts && block != 0) {
    result.largest = at::empty({(size + block - 1) / block}, arithmetic);
    kernels::cpu::block_magnitudes(
        source.data,
        dtype,
        source.residual,
        arithmetic,
        size,
        block,
        static_cast<char*>(result.largest.mutable_data_ptr()));
    source.largest = bytes_of(result.largest);
  }
  return result;
}

inline void expect_same_bits(
    const at::Tensor& actual,
    const at::Tensor& expected) {
  ASSERT_EQ(actual.defined(), expected.defined());
  if (expected.defined()) {
    // Not equal(): the signs of zeros count.
    EXPECT_TRUE(actual.view(at::kByte).equal(expected.view(at::kByte)));
  }
}

inline std::vector<Pushed> clone(const std::vector<Pushed>& all) {
  std::vector<Pushed> result = all;
  for (auto& one : result) {
    if (one.residual.defined()) {
      one.residual = one.residual.clone();
      one.source.residual = static_cast<char*>(one.residual.mutable_data_ptr());
    }
  }
  return result;
}

} // namespace torchkv

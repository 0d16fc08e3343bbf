#include "send_with_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <limits>

#include "../core/errors.h"
#include "../kernels/codecs.h"
#include "random_with_aten.h"

namespace torchkv {
namespace {

at::Tensor constant_like(const at::Tensor& like, double number) {
  return at::full_like(like, number);
}

// Finite numbers within [-most, most], rounded to a dtype with fewer bits.
at::Tensor sent_as(
    const at::Tensor& values,
    double most,
    c10::ScalarType dtype) {
  const at::Tensor limited =
      at::where(values.isfinite(), values.clamp(-most, most), values);
  return limited.to(at::kFloat).to(dtype).to(values.scalar_type());
}

// The scale of each element's block, and its inverse (codecs::scale_of).
struct ScaleOfBlocks {
  at::Tensor scale;
  at::Tensor inverse;
};

ScaleOfBlocks scales_of(
    const at::Tensor& values,
    int64_t block_size,
    double most) {
  const int64_t count = values.numel();
  const int64_t num_blocks = (count + block_size - 1) / block_size;
  const at::Tensor magnitudes = at::constant_pad_nd(
      at::where(values.isfinite(), values.abs(), at::zeros_like(values)),
      {0, num_blocks * block_size - count});
  const at::Tensor largest = magnitudes.view({num_blocks, block_size}).amax(1);
  // By a number, CUDA's operator would multiply by its inverse.
  const at::Tensor divisor = constant_like(largest, most);
  const at::Tensor scale = largest / divisor;
  const at::Tensor inverse = divisor / largest;
  const double least = values.scalar_type() == at::kDouble
      ? std::numeric_limits<double>::min()
      : std::numeric_limits<float>::min();
  const at::Tensor is_normal = scale.ge(least).logical_and(inverse.ge(least));
  const at::Tensor zeros = at::zeros_like(scale);
  const auto of_elements = [&](const at::Tensor& of_blocks) {
    return at::where(is_normal, of_blocks, zeros)
        .unsqueeze(1)
        .expand({num_blocks, block_size})
        .reshape({-1})
        .narrow(0, 0, count);
  };
  return {of_elements(scale), of_elements(inverse)};
}

at::Tensor nan_unless_finite(const at::Tensor& values, const at::Tensor& sent) {
  return at::where(
      values.isfinite(),
      sent,
      constant_like(values, std::numeric_limits<double>::quiet_NaN()));
}

at::Tensor sent_fp8(const at::Tensor& values, int64_t block_size) {
  constexpr double kMost = codecs::kFp8Max;
  const auto [scale, inverse] = scales_of(values, block_size, kMost);
  const at::Tensor scaled = (values * inverse).clamp_(-kMost, kMost);
  const at::Tensor sent = scaled.to(at::kFloat)
                              .to(at::kFloat8_e4m3fn)
                              .to(values.scalar_type())
                              .mul_(scale);
  return nan_unless_finite(values, sent);
}

at::Tensor sent_int4(
    const at::Tensor& values,
    int64_t block_size,
    uint64_t stream) {
  const auto [scale, inverse] = scales_of(values, block_size, codecs::kInt4Max);
  const at::Tensor finite =
      at::where(values.isfinite(), values, at::zeros_like(values));
  const at::Tensor codes =
      (finite * inverse)
          .add_(rounding_numbers_with_aten(values, block_size, stream))
          .clamp_(1, 15)
          .trunc_()
          .sub_(8);
  return nan_unless_finite(values, codes * scale);
}

// The elements of greatest magnitude: as integers, the bits of magnitudes have
// their order, with NaN above all others. Of ties the first ones.
at::Tensor sent_topk(const at::Tensor& values, int64_t num_sent) {
  const at::Tensor bits = values.abs().view(
      values.scalar_type() == at::kDouble ? at::kLong : at::kInt);
  const at::Tensor least =
      std::get<0>(bits.topk(num_sent, 0, /*largest=*/true, /*sorted=*/false))
          .amin();
  const at::Tensor is_greater = bits.gt(least);
  const at::Tensor is_tie = bits.eq(least);
  const at::Tensor num_ties = is_greater.sum().neg_().add_(num_sent);
  const at::Tensor is_sent =
      is_greater.logical_or(is_tie.logical_and(is_tie.cumsum(0).le(num_ties)));
  return at::where(is_sent, values, at::zeros_like(values));
}

at::Tensor sent_of(
    const Codec& codec,
    const at::Tensor& values,
    uint64_t stream) {
  using Id = Codec::Id;
  // Of the arithmetic's precision, as the kernels'.
  const double threshold = values.scalar_type() == at::kDouble
      ? codec.threshold
      : static_cast<float>(codec.threshold);
  const auto either =
      [&](const at::Tensor& condition, double number, const at::Tensor& other) {
        return at::where(condition, constant_like(values, number), other);
      };
  switch (codec.id) {
    case Id::k1Bit:
      return either(values.gt(threshold), 1, constant_like(values, -1));
    case Id::k2Bit:
      return either(
          values.ge(threshold),
          threshold,
          either(values.le(-threshold), -threshold, at::zeros_like(values)));
    case Id::kFp16:
      return sent_as(values, codecs::kFp16Max, at::kHalf);
    case Id::kBf16:
      return sent_as(values, codecs::kBf16Max, at::kBFloat16);
    case Id::kFp8:
      return sent_fp8(values, codec.block_size());
    case Id::kInt4:
      return sent_int4(values, codec.block_size(), stream);
    case Id::kTopK:
      return sent_topk(values, codec.num_sent(values.numel()));
    case Id::kNone:
      break;
  }
  TORCHKV_INTERNAL_ASSERT(false);
}

} // namespace

Sent send_with_aten(
    const Codec& codec,
    const at::Tensor& value,
    const at::Tensor& residual,
    c10::ScalarType dtype,
    uint64_t stream) {
  at::Tensor values = value.to(dtype);
  if (codec.has_feedback()) {
    values = values + residual;
  }
  Sent result;
  result.sent = sent_of(codec, values, stream);
  if (codec.has_feedback()) {
    result.residual = values - result.sent;
    const bool is_mxnet =
        codec.id == Codec::Id::k1Bit || codec.id == Codec::Id::k2Bit;
    if (!is_mxnet) { // codecs::residual_of
      result.residual = at::where(
          result.residual.isfinite(),
          result.residual,
          at::zeros_like(result.residual));
    }
  }
  return result;
}

} // namespace torchkv

#include "random_with_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>

#include <cmath>

namespace torchkv {
namespace {

// Arithmetic of unsigned 64-bit and 32-bit numbers in int64 tensors: products
// and sums wrap around; shifts to the right need a mask.
int64_t as_signed(uint64_t bits) {
  return static_cast<int64_t>(bits);
}

at::Tensor shifted_right(const at::Tensor& bits, int64_t count) {
  return bits.bitwise_right_shift(count).bitwise_and_(
      as_signed(~uint64_t{0} >> static_cast<uint64_t>(count)));
}

at::Tensor low_32_bits(const at::Tensor& bits) {
  return bits.bitwise_and(as_signed(0xFFFFFFFFU));
}

// mixed_bits of core/mixed_bits.h.
at::Tensor mixed_64(const at::Tensor& given) {
  at::Tensor bits = given + as_signed(0x9E3779B97F4A7C15U);
  bits = bits.bitwise_xor(shifted_right(bits, 30))
             .mul_(as_signed(0xBF58476D1CE4E5B9U));
  bits = bits.bitwise_xor(shifted_right(bits, 27))
             .mul_(as_signed(0x94D049BB133111EBU));
  return bits.bitwise_xor(shifted_right(bits, 31));
}

// codecs::random_from_8 of numbers of 32 bits.
at::Tensor random_from_8(at::Tensor bits) {
  bits = low_32_bits(
      bits.bitwise_xor(shifted_right(bits, 16)).mul_(int64_t{0x7FEB352D}));
  bits = low_32_bits(
      bits.bitwise_xor(shifted_right(bits, 15)).mul_(int64_t{0x846CA68B}));
  return shifted_right(bits, 12).to(at::kFloat).mul_(0x1p-20).add_(8);
}

// normal_number() of numbers of 64 bits.
at::Tensor normal_from_64(const at::Tensor& bits) {
  const at::Tensor u =
      shifted_right(bits, 40).add_(1).to(at::kFloat).mul_(0x1p-24);
  const at::Tensor v =
      bits.bitwise_and(int64_t{0xFFFFFF}).to(at::kFloat).mul_(0x1p-24);
  // The cosine of 2 pi (v - 1/2).
  return u.log_().mul_(-2).sqrt_().mul_(v.mul_(2 * M_PI).cos_().neg_());
}

} // namespace

at::Tensor rounding_numbers_with_aten(
    const at::Tensor& values,
    int64_t block_size,
    uint64_t stream) {
  const int64_t count = values.numel();
  const int64_t num_blocks = (count + block_size - 1) / block_size;
  const at::TensorOptions options = values.options().dtype(at::kLong);
  const at::Tensor of_blocks =
      low_32_bits(mixed_64(at::arange(num_blocks, options) + as_signed(stream)))
          .unsqueeze(1);
  const at::Tensor bits =
      low_32_bits(of_blocks + at::arange(block_size, options));
  return random_from_8(bits.view({-1}).narrow(0, 0, count))
      .to(values.scalar_type());
}

at::Tensor normal_numbers_with_aten(const at::Tensor& like, uint64_t stream) {
  const at::Tensor places =
      at::arange(like.numel(), like.options().dtype(at::kLong));
  return normal_from_64(mixed_64(places + as_signed(stream)))
      .as_strided(like.sizes(), like.strides())
      .to(like.scalar_type());
}

at::Tensor normal_numbers_with_aten(
    const at::Tensor& like,
    uint64_t stream,
    const at::Tensor& rows) {
  const int64_t row_size = like.numel() / like.size(0);
  const at::Tensor places = (rows * row_size).unsqueeze(1) +
      at::arange(row_size, like.options().dtype(at::kLong));
  return normal_from_64(mixed_64(places + as_signed(stream)))
      .view(like.sizes())
      .to(like.scalar_type());
}

} // namespace torchkv

#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

// Random numbers on devices without kernels, by ATen operators.
namespace torchkv {

// What int4 adds before it truncates (codecs::random_from_8), for each element
// of dense values.
at::Tensor rounding_numbers_with_aten(
    const at::Tensor& values,
    int64_t block_size,
    uint64_t stream);

// normal_number() of each number of a dense tensor, in the order of its memory,
// but for the last bits.
at::Tensor normal_numbers_with_aten(const at::Tensor& like, uint64_t stream);
// The same of some rows of a tensor, contiguous in `like`, by their numbers.
at::Tensor normal_numbers_with_aten(
    const at::Tensor& like,
    uint64_t stream,
    const at::Tensor& rows);

} // namespace torchkv

#include "compressed_values.h"

#include <ATen/ops/empty.h>

#include <cstring>
#include <utility>

#include "../core/checksum.h"
#include "../core/errors.h"
#include "../core/mixed_bits.h"
#include "../core/plain_dispatch.h"
#include "../kernels/cpu/compressed_sums.h"
#include "../kernels/cpu/select_top.h"
#include "../memory/layout.h"
#include "check.h"

namespace torchkv {
namespace {

// The random numbers of one compressed value: the same on every run.
uint64_t stream_of(const Codec& codec, const Entry& entry, size_t position) {
  const Key& key = entry.key;
  const uint64_t of_key = key.kind() == KeyKind::kInt
      ? static_cast<uint64_t>(key.id())
      : crc32(key.text().data(), key.text().size());
  uint64_t result = mixed_bits(static_cast<uint64_t>(codec.seed));
  for (const uint64_t part :
       {of_key,
        static_cast<uint64_t>(position),
        static_cast<uint64_t>(entry.num_compressed)}) {
    result = mixed_bits(result ^ part);
  }
  return result;
}

// The dtype in which codecs compute for a key, and of its residuals.
c10::ScalarType residual_dtype(const Meta& meta) {
  return meta.dtype == c10::kDouble ? c10::kDouble : c10::kFloat;
}

} // namespace

void check_compressible(
    const Call& call,
    const Entries& entries,
    const Compression& compression) {
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const Codec& codec = compression.codec_of(entry.key);
    const Where where{call.op, entry.key};
    if (codec.id == Codec::Id::kNone) {
      continue;
    }
    TORCHKV_CHECK_TYPE(
        c10::isFloatingType(entry.meta.dtype),
        where,
        "expected a stored value of floating-point dtype, as values pushed to "
        "the key are compressed, but got ",
        c10::toString(entry.meta.dtype));
    const auto check_cpu = [&](const char* what, c10::Device device) {
      TORCHKV_CHECK_NOT_IMPLEMENTED(
          device.is_cpu(),
          where,
          "expected ",
          what,
          " in CPU memory, as values pushed to the key are compressed, but got "
          "one on device ",
          device);
    };
    for (const auto& value : call.values->of(static_cast<int64_t>(i))) {
      check_cpu("values", value.device());
    }
    const std::lock_guard lock(entry.mutex);
    for (const auto& slice : entry.slices) {
      check_cpu("a stored value", slice.home.device);
    }
  }
}

Compressed compress(
    const Codec& codec,
    Entry& entry,
    size_t position,
    const at::Tensor& value,
    Slices& slices) {
  Compressed result;
  result.sizes = entry.meta.sizes;
  result.dtype = residual_dtype(entry.meta);
  result.codec = codec;
  if (codec.has_feedback()) {
    if (entry.residuals.size() == position) {
      at::Tensor zeros = slices.empty_like(entry, result.dtype, c10::kCPU);
      std::memset(zeros.mutable_data_ptr(), 0, zeros.nbytes());
      entry.residuals.push_back(std::move(zeros));
    }
    result.residual = entry.residuals.at(position);
  } else {
    result.stream = stream_of(codec, entry, position);
  }
  const int64_t num_elements = entry.meta.num_elements;
  if (num_elements == 0) {
    return result;
  }
  const auto* const data = static_cast<const char*>(value.const_data_ptr());
  const char* const residual = result.residual.defined()
      ? static_cast<const char*>(result.residual.const_data_ptr())
      : nullptr;
  const int64_t block_size = codec.block_size();
  if (block_size != 0 && entry.slices.size() > 1) {
    const PlainDispatch plain;
    result.largest = at::empty(
        {(num_elements + block_size - 1) / block_size},
        at::TensorOptions().dtype(result.dtype));
    kernels::cpu::block_magnitudes(
        data,
        value.scalar_type(),
        residual,
        result.dtype,
        num_elements,
        block_size,
        static_cast<char*>(result.largest.mutable_data_ptr()));
  }
  if (codec.id == Codec::Id::kTopK) {
    const auto top = kernels::cpu::select_top(
        data,
        value.scalar_type(),
        residual,
        result.dtype,
        num_elements,
        codec.num_sent(num_elements));
    result.least_bits = top.least_bits;
    result.ties_end = top.ties_end;
  }
  return result;
}

void check_residuals(
    const char* op,
    const Entry& entry,
    at::TensorList residuals) {
  const Where where{op, entry.key};
  for (const auto& residual : residuals) {
    TORCHKV_CHECK_VALUE(
        c10::isFloatingType(entry.meta.dtype) &&
            residual.scalar_type() == residual_dtype(entry.meta),
        where,
        "expected residuals of dtype ",
        residual_dtype(entry.meta),
        " of a floating-point value, but got ",
        residual.scalar_type(),
        " of a value of dtype ",
        entry.meta.dtype);
    check_shape(where, entry.meta, residual.sizes());
  }
}

} // namespace torchkv

#include "pack_value.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "../kernels/cpu/packed_codes.h"
#include "../store/compressed_values.h"

namespace torchkv::dist {
namespace {

// The residual that an entry has, of zeros where there is none.
at::Tensor residual_of(Entry& entry) {
  if (entry.residuals.empty()) {
    at::Tensor zeros =
        Buffers().empty(entry.meta.sizes, residual_dtype(entry.meta));
    std::memset(zeros.mutable_data_ptr(), 0, zeros.nbytes());
    entry.residuals.push_back({std::move(zeros), {}});
  }
  return entry.residuals[0].tensor;
}

const char* from(const at::Tensor& tensor, int64_t begin) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
      begin * static_cast<int64_t>(tensor.element_size());
}

} // namespace

std::vector<Blob> pack_value(
    const StoreCompression& compression,
    Entry& entry,
    int64_t rank,
    const at::Tensor& value,
    c10::ArrayRef<Place> places,
    const Buffers& buffers) {
  const Codec& codec = compression.get().codec_of(entry.key);
  const std::lock_guard lock(entry.mutex);
  renew_residuals(entry, compression);
  at::Tensor residual;
  uint64_t stream = 0;
  if (codec.has_feedback()) {
    entry.residual_generation =
        std::max(entry.residual_generation, compression.generation());
    residual = residual_of(entry);
  } else {
    stream = stream_of(codec, entry, static_cast<size_t>(rank));
  }
  const Compressed sent =
      compress(codec, entry.meta, value, residual, stream, /*is_divided=*/true);
  std::vector<Blob> codes;
  for (const Place& place : places) {
    kernels::cpu::CompressedSource source;
    source.data = from(value, place.begin);
    source.dtype = value.scalar_type();
    source.codec = codec;
    if (residual.defined()) {
      source.residual = static_cast<char*>(residual.mutable_data_ptr()) +
          place.begin * static_cast<int64_t>(residual.element_size());
    }
    source.stream = stream;
    if (sent.largest.defined()) {
      source.largest = from(sent.largest, 0);
    }
    source.least_bits = sent.least_bits;
    source.ties_end = sent.ties_end;
    at::Tensor bytes;
    kernels::cpu::pack_codes(
        source,
        place.begin,
        place.end - place.begin,
        sent.dtype,
        [&](int64_t num_bytes) {
          bytes = buffers.empty_codes(num_bytes);
          return static_cast<char*>(bytes.mutable_data_ptr());
        });
    codes.push_back(blob_of(bytes));
  }
  ++entry.num_compressed;
  return codes;
}

} // namespace torchkv::dist

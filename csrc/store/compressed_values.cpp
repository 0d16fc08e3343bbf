#include "compressed_values.h"

#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "../core/errors.h"
#include "../core/plain_dispatch.h"
#include "../core/random_stream.h"
#include "../kernels/cpu/compressed_sums.h"
#include "../kernels/cpu/select_top.h"
#include "../memory/layout.h"
#include "check.h"

namespace torchkv {
namespace {

// The residual of a position, of zeros where there is none yet. REQUIRES:
// called for the positions before it.
Residual& residual_at(Entry& entry, size_t position, Slices& slices) {
  if (entry.residuals.size() == position) {
    at::Tensor zeros =
        slices.empty_like(entry, residual_dtype(entry.meta), c10::kCPU);
    std::memset(zeros.mutable_data_ptr(), 0, zeros.nbytes());
    entry.residuals.push_back({std::move(zeros), {}});
  }
  return entry.residuals.at(position);
}

// The shape and strides of a value for a tensor of its elements.
at::Tensor laid_out_as(const at::Tensor& value, const at::Tensor& tensor) {
  return at::as_strided(tensor, value.sizes(), value.strides());
}

// Returns what `send(order, place, values)` does for an entry's values, all on
// one device, with their residuals there; lays out the residuals that it leaves
// as the values.
template <class Send>
auto send_from_device(
    const Codec& codec,
    Entry& entry,
    size_t position,
    c10::ArrayRef<Value> values,
    Slices& slices,
    Send send) {
  const int64_t num_elements = entry.meta.num_elements;
  const at::Tensor& first = *values[0].data;
  const Place place{first.device()};
  for (size_t i = 0; codec.has_feedback() && i < values.size(); ++i) {
    Residual& kept = residual_at(entry, position + i, slices);
    if (kept.tensor.device() != place.device) {
      const at::Tensor moved =
          slices.empty_like(entry, residual_dtype(entry.meta), place.device);
      slices.copy(
          moved,
          kept.tensor.is_cpu() ? kept.tensor
                               : residual_on_cpu(entry, kept, slices));
      kept.tensor = moved;
    }
  }
  StreamOrder order(slices.streams());
  order.enter(place);
  c10::SmallVector<ToSend, 4> all;
  for (size_t i = 0; i < values.size(); ++i) {
    ToSend& value = all.emplace_back();
    value.value = part_of(*values[i].data, 0, num_elements);
    value.stream = stream_of(codec, entry, position + i);
    if (codec.has_feedback()) {
      Residual& kept = entry.residuals[position + i];
      if (order.enter(place, kept.timeline)) {
        order.runtime().keep_until_done(kept.tensor, order.stream(place));
      }
      value.residual = part_of(kept.tensor, 0, num_elements);
    }
  }
  const PlainDispatch plain;
  const c10::InferenceMode normal(false);
  auto result = send(order, place, all);
  for (auto& residual : result.residuals) {
    if (residual.defined()) {
      residual = laid_out_as(first, residual);
    }
  }
  return result;
}

} // namespace

c10::ScalarType residual_dtype(const Meta& meta) {
  return meta.dtype == c10::kDouble ? c10::kDouble : c10::kFloat;
}

void renew_residuals(Entry& entry, const StoreCompression& compression) {
  const uint64_t generation = compression.generation();
  const bool has_feedback =
      compression.get().codec_of(entry.key).has_feedback();
  // Not those of a later compression, which this call does not know.
  if (entry.residual_generation < compression.since(entry.key) ||
      (!has_feedback && entry.residual_generation <= generation)) {
    entry.residuals.clear();
  }
}

void free_residuals(
    c10::ArrayRef<EntryPtr> entries,
    const StoreCompression* next,
    uint64_t later) {
  for (const auto& entry : entries) {
    const std::unique_lock lock(entry->mutex, std::try_to_lock);
    if (lock.owns_lock() && entry->residual_generation < later &&
        (next == nullptr || !next->get().codec_of(entry->key).has_feedback())) {
      entry->residuals.clear();
    }
  }
}

uint64_t stream_of(const Codec& codec, const Entry& entry, size_t position) {
  return random_stream(
      static_cast<uint64_t>(codec.seed),
      entry.key,
      {static_cast<uint64_t>(position),
       static_cast<uint64_t>(entry.num_compressed)});
}

void check_compressible(
    const Call& call,
    const Entries& entries,
    const Compression& compression,
    Runtime& runtime) {
  for (size_t i = 0; i < entries.size(); ++i) {
    Entry& entry = *entries[i];
    const Codec& codec = compression.codec_of(entry.key);
    const Where where{call.op, entry.key};
    const auto number = static_cast<int64_t>(i);
    bool is_dense = true; // else they are not compressed
    for (int64_t j = call.values->begin(number); j < call.values->ends[i];
         ++j) {
      is_dense = is_dense && call.values->value(j).dense() != nullptr;
    }
    if (codec.id == Codec::Id::kNone || !is_dense) {
      continue;
    }
    TORCHKV_CHECK_TYPE(
        c10::isFloatingType(entry.meta.dtype),
        where,
        "expected a stored value of floating-point dtype, as values pushed to "
        "the key are compressed, but got ",
        dtype_name(entry.meta.dtype));
    for (const auto& value : call.values->of(number)) {
      check_not_capturing(where, runtime, value.device(), "compressed");
    }
    const std::lock_guard lock(entry.mutex);
    check_not_capturing(where, runtime, entry, "compressed");
  }
}

bool are_in_cpu_memory(const Entry& entry, c10::ArrayRef<Value> values) {
  return std::all_of(
             values.begin(),
             values.end(),
             [](const Value& value) { return value.device().is_cpu(); }) &&
      std::all_of(
             entry.slices.begin(), entry.slices.end(), [](const Slice& slice) {
               return slice.home.device.is_cpu();
             });
}

Compressed compress(
    const Codec& codec,
    Entry& entry,
    size_t position,
    const at::Tensor& value,
    Slices& slices) {
  at::Tensor kept;
  if (codec.has_feedback()) {
    Residual& residual = residual_at(entry, position, slices);
    if (!residual.tensor.is_cpu()) {
      residual.tensor = residual_on_cpu(entry, residual, slices);
    }
    kept = residual.tensor;
  }
  return compress(
      codec,
      entry.meta,
      value,
      std::move(kept),
      stream_of(codec, entry, position),
      entry.slices.size() > 1);
}

Compressed compress(
    const Codec& codec,
    const Meta& meta,
    const at::Tensor& value,
    at::Tensor kept,
    uint64_t stream,
    bool is_divided) {
  Compressed result;
  result.sizes = meta.sizes;
  result.dtype = residual_dtype(meta);
  result.codec = codec;
  result.residual = std::move(kept);
  result.stream = stream;
  const int64_t num_elements = meta.num_elements;
  if (num_elements == 0) {
    return result;
  }
  const auto* const data = static_cast<const char*>(value.const_data_ptr());
  const char* const residual = result.residual.defined()
      ? static_cast<const char*>(result.residual.const_data_ptr())
      : nullptr;
  const int64_t block_size = codec.block_size();
  if (block_size != 0 && is_divided) {
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

SentSum compress_to_dense(
    const Codec& codec,
    Entry& entry,
    size_t position,
    c10::ArrayRef<Value> values,
    Slices& slices) {
  const auto send_sum = [&](StreamOrder& order,
                            const Place& place,
                            c10::ArrayRef<ToSend> all) -> SentSum {
    const at::Tensor& first = *values[0].data;
    if (first.numel() == 0) {
      return {first, c10::SmallVector<at::Tensor, 4>(values.size())};
    }
    SentSum result = send(order, place, codec, all, residual_dtype(entry.meta));
    result.sum = laid_out_as(first, result.sum);
    return result;
  };
  return send_from_device(codec, entry, position, values, slices, send_sum);
}

SentCodes compress_to_codes(
    const Codec& codec,
    Entry& entry,
    size_t position,
    c10::ArrayRef<Value> values,
    Slices& slices) {
  const auto send =
      [&](StreamOrder& order, const Place& place, c10::ArrayRef<ToSend> all) {
        return send_codes(order, place, codec, all, residual_dtype(entry.meta));
      };
  return send_from_device(codec, entry, position, values, slices, send);
}

bool leaves_as_codes(const Codec& codec, const Entry& entry, c10::Device from) {
  // Fewer are copied in less time than a kernel takes to start.
  constexpr int64_t kLeast = int64_t{32} * 1024;
  return entry.meta.num_elements >= kLeast &&
      std::all_of(
             entry.slices.begin(),
             entry.slices.end(),
             [&](const Slice& slice) {
               return has_codes(codec, from, slice.home.device);
             }) &&
      std::any_of(
             entry.slices.begin(), entry.slices.end(), [&](const Slice& slice) {
               return slice.home.device != from;
             });
}

at::Tensor residual_on_cpu(
    const Entry& entry,
    Residual& residual,
    Slices& slices) {
  StreamOrder order(slices.streams());
  order.enter(Place{residual.tensor.device()}, residual.timeline);
  at::Tensor copy =
      slices.empty_like(entry, residual.tensor.scalar_type(), c10::kCPU);
  slices.copy(copy, residual.tensor);
  return copy;
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

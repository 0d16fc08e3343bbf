#include "held_parts.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/searchsorted.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "../core/plain_dispatch.h"
#include "buffers.h"
#include "bytes.h"
#include "row_payload.h"
#include "saved_fields.h"
#include "snapshot_files.h"

namespace torchkv::dist {
namespace {

at::Tensor joined(
    c10::ArrayRef<Blob> pieces,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) {
  const PlainDispatch plain;
  at::Tensor result = at::empty(sizes, at::TensorOptions(dtype));
  size_t num_bytes = 0;
  for (const Blob& piece : pieces) {
    num_bytes += piece.size();
  }
  TORCH_CHECK(
      num_bytes == result.nbytes(),
      kSave,
      ": expected ",
      result.nbytes(),
      " bytes of a value or its state, but the servers have ",
      num_bytes);
  copy_pieces(pieces, result.mutable_data_ptr());
  return result;
}

KeyState state_in(const Shot& shot) {
  const auto* stored = dynamic_cast<const StoredValue*>(shot.value.get());
  return stored != nullptr && stored->state ? *stored->state : KeyState();
}

} // namespace

at::Tensor write_parts(const Shard& shard, const UnsentByKey& unsent) {
  ByteWriter out;
  out.add(static_cast<uint64_t>(shard.slices.size()));
  for (const auto& [slice, shot] : shard.slices) {
    out.add(slice.key);
    out.add(slice.index);
    out.add(shot->version);
    out.add(shot->value->pieces);
    write_state(out, state_in(*shot));
    out.add(static_cast<uint8_t>(shot->spec.is_row_sparse()));
    if (shot->spec.is_row_sparse()) {
      write_row_init(out, *shot->spec.row_init);
    }
  }
  out.add(static_cast<uint64_t>(unsent.size()));
  for (const auto& [key, kept] : unsent) {
    out.add(key);
    out.add(kept.num_compressed);
    const bool has_residual = kept.residual.defined();
    out.add(static_cast<uint8_t>(has_residual));
    if (has_residual) {
      out.add(static_cast<int8_t>(kept.residual.scalar_type()));
      out.add(c10::ArrayRef<Blob>(blob_of(kept.residual)));
    }
  }
  const std::vector<Blob> bytes = out.take();
  int64_t size = 0;
  for (const auto& blob : bytes) {
    size += static_cast<int64_t>(blob.size());
  }
  return joined(bytes, size, at::kByte);
}

ReadParts read_parts(const std::vector<at::Tensor>& of_ranks) {
  ReadParts result;
  for (const auto& bytes : of_ranks) {
    ByteReader in(blob_of(bytes), kSave);
    for (uint64_t i = in.count(); i > 0; --i) {
      Parts& parts = result.parts[in.key()];
      Part part;
      part.index = in.number<int32_t>();
      part.version = in.number<int64_t>();
      part.pieces = {in.blob()};
      part.state = read_state(in);
      if (in.number<uint8_t>() != 0) {
        part.row_init = read_row_init(in);
      }
      parts.push_back(std::move(part));
    }
    UnsentByKey& unsent = result.unsent.emplace_back();
    for (uint64_t i = in.count(); i > 0; --i) {
      Unsent& kept = unsent[in.key()];
      kept.num_compressed = in.number<int64_t>();
      if (in.number<uint8_t>() != 0) {
        const auto dtype = static_cast<c10::ScalarType>(in.number<int8_t>());
        const Blob blob = in.blob();
        const auto item = static_cast<int64_t>(c10::elementSize(dtype));
        kept.residual =
            joined(blob, static_cast<int64_t>(blob.size()) / item, dtype);
      }
    }
    in.end();
  }
  for (auto& [key, parts] : result.parts) {
    std::sort(parts.begin(), parts.end(), [](auto& a, auto& b) {
      return a.index < b.index;
    });
  }
  return result;
}

PartsByKey parts_of(const Shard& shard) {
  PartsByKey result;
  for (const auto& [slice, shot] : shard.slices) {
    result[slice.key].push_back(
        {slice.index,
         shot->version,
         shot->value->pieces,
         state_in(*shot),
         shot->spec.row_init});
  }
  return result;
}

at::Tensor join_values(
    const Parts& parts,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype) {
  std::vector<Blob> pieces;
  for (const auto& part : parts) {
    pieces.insert(pieces.end(), part.pieces.begin(), part.pieces.end());
  }
  return joined(pieces, sizes, dtype);
}

KeyState join_states(const Parts& parts, c10::IntArrayRef sizes) {
  KeyState result;
  result.step = parts[0].state.step;
  result.num_accumulated = parts[0].state.num_accumulated;
  for (const auto& [name, first] : parts[0].state.tensors) {
    std::vector<Blob> pieces;
    for (const auto& part : parts) {
      const auto found = part.state.tensors.find(name);
      TORCH_CHECK(
          found != part.state.tensors.end(),
          kSave,
          ": the servers keep different states of a key");
      pieces.push_back(blob_of(found->second.contiguous()));
    }
    result.tensors[name] = joined(pieces, sizes, first.scalar_type());
  }
  return result;
}

JoinedRows join_rows(const Parts& parts, const Meta& meta) {
  const PlainDispatch plain;
  const int64_t row_bytes =
      meta.row_size() * static_cast<int64_t>(c10::elementSize(meta.dtype));
  std::vector<at::Tensor> ids;
  std::vector<at::Tensor> values;
  for (const auto& part : parts) {
    int64_t num_bytes = 0;
    for (const Blob& piece : part.pieces) {
      num_bytes += static_cast<int64_t>(piece.size());
    }
    const Blob payload =
        blob_of(tensor_of(part.pieces, num_bytes, c10::kByte, Buffers()));
    ids.push_back(
        ids_in(payload, meta.sizes[0], row_bytes, IdOrder::kDistinct));
    c10::SmallVector<int64_t, 4> sizes(meta.sizes);
    sizes[0] = ids.back().numel();
    values.push_back(
        cells_in(payload, sizes[0], meta.row_size(), meta.dtype, Buffers())
            .view(sizes));
  }
  return {at::cat(ids), at::cat(values)};
}

KeyState state_of_rows(
    const KeyState& state,
    const at::Tensor& ids_of_state,
    const at::Tensor& ids) {
  const PlainDispatch plain;
  const auto [sorted, order] = ids_of_state.sort();
  const at::Tensor numbers =
      order.index_select(0, at::searchsorted(sorted, ids));
  KeyState result;
  result.step = state.step;
  result.num_accumulated = state.num_accumulated;
  for (const auto& [name, tensor] : state.tensors) {
    result.tensors[name] = tensor.to(c10::kCPU).index_select(0, numbers);
  }
  return result;
}

KeyState cut_state(const KeyState& state, const Place& place, bool is_split) {
  KeyState result;
  result.step = state.step;
  result.num_accumulated = state.num_accumulated;
  for (const auto& [name, tensor] : state.tensors) {
    const at::Tensor part = is_split
        ? tensor.contiguous().flatten().slice(0, place.begin, place.end)
        : tensor;
    result.tensors[name] = part.clone(at::MemoryFormat::Contiguous);
  }
  return result;
}

} // namespace torchkv::dist

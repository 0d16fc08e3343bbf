#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "../core/key.h"
#include "../core/row_init.h"
#include "../memory/key_state.h"
#include "../memory/meta.h"
#include "protocol/round.h"
#include "protocol/slice.h"

namespace torchkv::dist {

constexpr auto* kSave = "save"; // the call

// What one server holds of a key.
struct Part {
  int32_t index = 0; // of the slice
  int64_t version = 0;
  Blobs pieces; // of the value, in order; of a row-sparse key, its rows
  KeyState state; // of as many elements
  std::optional<RowInit> row_init; // of a row-sparse key
};
using Parts = std::vector<Part>; // in the order of the value
using PartsByKey = std::unordered_map<Key, Parts, KeyHash>;

// What the compression of a rank keeps of a key.
struct Unsent {
  int64_t num_compressed = 0;
  at::Tensor residual; // undefined: zeros, or none
};
using UnsentByKey = std::unordered_map<Key, Unsent, KeyHash>;

// What a rank's server holds of some keys, and what its worker has not sent, as
// bytes; and the same of several ranks.
at::Tensor write_parts(const Shard& shard, const UnsentByKey& unsent = {});
struct ReadParts {
  PartsByKey parts;
  std::vector<UnsentByKey> unsent; // by rank
};
ReadParts read_parts(const std::vector<at::Tensor>& of_ranks);
// What one server holds.
PartsByKey parts_of(const Shard& shard);

// The elements and the state of all parts, copied into tensors of this shape.
at::Tensor join_values(
    const Parts& parts,
    c10::IntArrayRef sizes,
    c10::ScalarType dtype);
KeyState join_states(const Parts& parts, c10::IntArrayRef sizes);
// The rows of a row-sparse key: in the order of the parts, as their states are.
struct JoinedRows {
  at::Tensor ids;
  at::Tensor values;
};
JoinedRows join_rows(const Parts& parts, const Meta& meta);

// A copy of what the server of `place` holds of a key's state.
KeyState cut_state(const KeyState& state, const Place& place, bool is_split);
// The same of the state of rows, for some of these. REQUIRES: those of `ids`
// are among those of the state.
KeyState state_of_rows(
    const KeyState& state,
    const at::Tensor& ids_of_state,
    const at::Tensor& ids);

} // namespace torchkv::dist

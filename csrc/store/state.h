#pragma once

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "../core/export.h"
#include "../core/key.h"
#include "../core/row_init.h"
#include "../memory/key_state.h"
#include "../update/optimizer.h"
#include "compression.h"

namespace torchkv {

// The content of a store, in types that both TorchScript's archives and
// Python's pickle support; used by `save`, `copy.deepcopy` and `pickle`.
struct TORCHKV_API StoreState {
  using Numbers = c10::Dict<std::string, double>;
  using Tensors = c10::Dict<std::string, at::Tensor>;
  using OptimizerTuple = std::tuple<
      std::string, // name; empty = no optimizer
      std::vector<Numbers>, // of the rule, by group
      Numbers, // how gradients are handled
      // Keys with options: int or str, group, and two multipliers.
      std::vector<int64_t>,
      std::vector<std::string>,
      std::vector<int64_t>,
      std::vector<double>,
      // In the order of all keys: steps, accumulated pushes, state.
      std::vector<int64_t>,
      std::vector<int64_t>,
      std::vector<Tensors>>;
  using CompressionTuple = std::tuple<
      // Of each group: a codec and its options. No group = no compression.
      std::vector<std::string>,
      std::vector<Numbers>,
      // Keys of groups after the first: int or str, group.
      std::vector<int64_t>,
      std::vector<std::string>,
      std::vector<int64_t>,
      // In the order of all keys: residuals by position, compressed pushes.
      std::vector<std::vector<at::Tensor>>,
      std::vector<int64_t>>;
  using RowsTuple = std::tuple<
      // Of each row-sparse key: its index in the order of all keys, the ids of
      // its rows in the order of its value's, how many rows it may have (-1:
      // any number), and the initial value of rows.
      std::vector<int64_t>,
      std::vector<at::Tensor>,
      std::vector<int64_t>,
      std::vector<std::string>,
      std::vector<Numbers>,
      std::vector<int64_t>>;
  using Tuple = std::tuple<
      int64_t, // format, 4
      std::string, // store type
      std::string, // kind of the keys: "int", "str", or "" before any init
      std::vector<int64_t>, // int keys, in order of init
      std::vector<std::string>, // str keys, in order of init
      std::vector<at::Tensor>, // the stored values, in the order of the keys
      std::vector<int64_t>, // number of updates of each key
      std::vector<at::Tensor>, // an opaque updater as bytes, or none
      OptimizerTuple,
      CompressionTuple,
      RowsTuple>;

  // Of a row-sparse key, whose value is a tensor of the rows that it has.
  struct Rows {
    at::Tensor ids; // of these rows
    std::optional<int64_t> num_rows; // that it may have; none: any number
    RowInit init;
  };

  std::string type;
  std::string key_kind;
  std::vector<int64_t> int_keys;
  std::vector<std::string> str_keys;
  std::vector<at::Tensor> values;
  std::vector<int64_t> versions;
  std::vector<at::Tensor> updater;
  std::optional<Optimizer> optimizer; // without a generation
  std::vector<KeyState> states; // if there is an optimizer
  std::optional<Compression> compression = std::nullopt;
  // If there is a compression, by key.
  std::vector<std::vector<at::Tensor>> residuals = {};
  std::vector<int64_t> num_compressed = {};
  std::map<size_t, Rows> rows = {}; // by index in `values`

  std::optional<KeyKind> kind() const; // of the keys

  Tuple to_tuple() &&;
  // ValueError if the parts are inconsistent.
  static StoreState from_tuple(Tuple tuple);

  // The CRC-32 of all that it holds: names, keys, numbers, and the elements of
  // its tensors in row-major order, wherever they are. Blocks until tensors on
  // accelerators are copied. REQUIRES: the GIL is released.
  int64_t checksum() const;
};

// What one of several processes holds of a store: see Store::own_state.
struct OwnState {
  StoreState state;
  std::vector<int64_t> begins; // by key; -1: whole
  // Of a store on several machines, whose state has none, and which compresses:
  // of all keys, how many pushes this process has compressed, and the residual,
  // of the whole value; undefined without error feedback.
  std::vector<std::tuple<Key, int64_t, at::Tensor>> residuals;
};

TORCHKV_API NumbersByName from_dict(const StoreState::Numbers& numbers);

} // namespace torchkv

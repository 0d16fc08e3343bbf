#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "export.h"

namespace torchkv {

// Everything a store is made of, in types that TorchScript's archives and
// Python's pickle both carry: what `save`, `copy.deepcopy` and `pickle` go
// through.
struct TORCHKV_API StoreState {
  using Tuple = std::tuple<
      int64_t, // format, 1
      std::string, // store type
      std::string, // kind of the keys: "int", "str", or "" before any init
      std::vector<int64_t>, // int keys, in order of init
      std::vector<std::string>, // str keys, in order of init
      std::vector<at::Tensor>, // the stored values, in the order of the keys
      std::vector<int64_t>, // number of updates of each key
      std::vector<at::Tensor>>; // the updater as bytes; empty = ASSIGN

  std::string type;
  std::string key_kind;
  std::vector<int64_t> int_keys;
  std::vector<std::string> str_keys;
  std::vector<at::Tensor> values;
  std::vector<int64_t> versions;
  std::vector<at::Tensor> updater;

  Tuple to_tuple() &&;
  // ValueError where the parts do not fit together.
  static StoreState from_tuple(Tuple tuple);
};

} // namespace torchkv

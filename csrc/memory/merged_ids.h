#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "../core/export.h"
#include "../core/row_sparse.h"

namespace torchkv {

// Ids of the row-sparse values of a key, on one device.
struct IdsOfKey {
  int64_t num_rows = 0; // of the key
  std::vector<at::Tensor> values; // int64, contiguous, not empty
};

constexpr int64_t kMaxMergedIds =
    std::numeric_limits<int32_t>::max(); // PyTorch sorts no more on CUDA
constexpr int64_t kMaxMergedRows = std::numeric_limits<int64_t>::max() / 2;

// Merges the ids of each key, those of all keys together: the host waits once,
// however many they are. Nothing where an id is not in [0, num_rows).
//
// REQUIRES: PlainDispatch; at least one key; not more than kMaxMergedIds in
// all, and kMaxMergedRows if there are several keys. Work is enqueued on the
// device's current stream, and has read the ids when this returns.
TORCHKV_API std::vector<MergedIds> merge_ids(c10::ArrayRef<IdsOfKey> keys);

} // namespace torchkv

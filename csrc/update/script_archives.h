#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../core/export.h"

namespace torchkv {

// Copies of one TorchScript updater, each with a state of its own
// (ScriptUpdater::serialize), as the bytes of one updater in a saved store: the
// archive itself if all are equal. REQUIRES: at least one, vectors of bytes.
TORCHKV_API at::Tensor pack_archives(const std::vector<at::Tensor>& archives);

// The archives; one if all were equal. ValueError if the bytes are damaged.
TORCHKV_API std::vector<at::Tensor> unpack_archives(const at::Tensor& bytes);

} // namespace torchkv

#pragma once

#include <c10/core/Device.h>

#include "../core/export.h"
#include "runtime.h"

namespace torchkv {

// Whether kernels on `device` may use memory of `peer`, CUDA devices both. The
// first call for a pair enables peer access and synchronizes both devices;
// later calls are a lookup without a lock, for the life of the process. Always
// false with TORCHKV_P2P=0. Thread-safe.
TORCHKV_API bool may_use_peer(
    Runtime& runtime,
    c10::Device device,
    c10::Device peer);

// For tests: forgets the results.
TORCHKV_API void forget_peers();

} // namespace torchkv
